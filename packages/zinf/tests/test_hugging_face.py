"""`zinf train --model DIR`: a directory in Hugging Face's layout, fine-tuned and exported as transformers loads it.

The model is a small Llama with random weights; the comparison is plain torch with transformers.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.nn import functional as F

import zinf
from zinf.cli import main
from zinf.models import widened_linear
from zinf.training import activation_memory, head_loss
from zinf.training.text_source import read_text
from zinf.training.token_data import TokenData, training_batch, validation_batches

transformers = pytest.importorskip("transformers", reason="reads the directories")
tokenizers = pytest.importorskip("tokenizers")

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 60
TALKS = [
    [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": str(a + b)}]
    for a in range(12)
    for b in range(12)
]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
BATCH, SEQ, STEPS, LR = 4, 16, 6, 1e-2
FLAGS = ("--batch", BATCH, "--seq", SEQ, "--lr", LR, "--dtype", "fp32", "--warmup", 0, "--decay", 0,
         "--validation-batches", 2, "--sample-length", 8)  # fmt: skip


def make_tokenizer(folder, template=None):
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator([TEXT], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer(folder, TEMPLATE)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, eos_token_id=1, bos_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_text(TEXT)
    return path


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def train(out, model, data, *arguments):
    found = run("train", "--out", out, "--model", model, "--data", data, *FLAGS, "--steps", STEPS, *arguments)
    assert found.exit_code == 0, found.output
    return found


def losses(out):
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def printed_losses(found):
    return [float(value) for value in re.search(r"loss: (\S+) before, (\S+) after", found.stdout).groups()]


def loss_of(model, tokens, targets):
    return F.cross_entropy(model(input_ids=tokens).logits.flatten(0, -2), targets.flatten())


def validation_loss(model, data):
    batches = validation_batches(data, batches=2, batch=BATCH, seq=SEQ)
    with torch.no_grad():
        return sum(loss_of(model, *batch).item() for batch in batches) / len(batches)


def plain_run(model_dir, data):
    """The same fine-tuning by plain torch: losses of the steps, and validation losses before and after."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    before, seen = validation_loss(model, data), []
    for step in range(STEPS):
        loss = loss_of(model, *training_batch(data, seed=0, step=step, batch=BATCH, seq=SEQ))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen, before, validation_loss(model, data)


def tokens_of(tokenizer, text):
    return TokenData.from_tokens(np.array([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], dtype=np.uint32))


@pytest.fixture(scope="module")
def fine_tuned(model_dir, text_file, tmp_path_factory):
    """The folder of a run of six steps, and what it printed."""
    out = tmp_path_factory.mktemp("run") / "out"
    return out, train(out, model_dir, text_file, "--save-every", 3)


def test_the_losses_are_those_of_plain_torch_with_transformers(fine_tuned, model_dir):
    out, found = fine_tuned
    data = tokens_of(transformers.AutoTokenizer.from_pretrained(model_dir), TEXT)
    seen, before, after = plain_run(model_dir, data)
    assert losses(out) == pytest.approx(seen, rel=1e-5)
    assert printed_losses(found) == pytest.approx([before, after], abs=1e-4)  # printed with four digits
    assert after < before - 1
    assert "nats a token" in found.stdout


def test_the_exported_directory_loads_in_transformers_with_the_same_loss(fine_tuned, model_dir, tmp_path):
    out, found = fine_tuned
    assert run("export", out, tmp_path / "hf").exit_code == 0
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {path.name for path in model_dir.iterdir()}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.chat_template == TEMPLATE
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert validation_loss(model, tokens_of(tokenizer, TEXT)) == pytest.approx(printed_losses(found)[1], abs=1e-4)


def test_a_bf16_run_is_exported_as_bf16_whatever_the_directory_said(model_dir, text_file, tmp_path):
    train(tmp_path / "out", model_dir, text_file, "--dtype", "bf16")
    assert run("export", tmp_path / "out", tmp_path / "hf").exit_code == 0
    assert json.loads((model_dir / "config.json").read_text())["dtype"] == "float32"
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype is torch.bfloat16


def test_a_resumed_run_is_the_run_that_never_stopped(fine_tuned, model_dir, text_file, tmp_path):
    """With the directory at another place; its weights are not needed any more."""
    moved = tmp_path / "moved"
    shutil.copytree(model_dir, moved, ignore=lambda *_: ["model.safetensors"])
    shutil.copytree(fine_tuned[0], tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoint-000002")
    train(tmp_path / "out", moved, text_file, "--resume")
    assert losses(tmp_path / "out") == losses(fine_tuned[0])


def test_the_way_it_runs_changes_no_number(fine_tuned, model_dir, text_file, tmp_path):
    train(tmp_path / "out", model_dir, text_file, "--preset", "zero3", "--overlap-optimizer", "false")
    assert losses(tmp_path / "out") == losses(fine_tuned[0])


@pytest.mark.parametrize("tiles", [1, 3])
def test_bf16_layers_multiply_in_fp32_where_that_is_faster_and_round_once(tiles, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Linear(40, 8, bias=False)).bfloat16()
    expected, x = copy.deepcopy(plain).float(), torch.randn(6, 24).bfloat16()
    widened_linear.widen_linear_layers(plain)
    zinf.tiled(plain[0], tiles)
    model = zinf.shard(plain, zinf.Config())
    first = expected[0](x.float()).bfloat16()
    second = expected[1](first.float()).bfloat16()
    found = model(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, second)
    found.square().sum().backward()
    second.square().sum().backward()
    for param, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(param.grad.float(), other.grad, rtol=0.01, atol=0.01 * other.grad.abs().max())


def test_checkpointed_blocks_change_no_number(fine_tuned, model_dir, text_file, tmp_path):
    train(tmp_path / "out", model_dir, text_file, "--activations", "nvme")
    assert losses(tmp_path / "out") == losses(fine_tuned[0])


def test_large_logits_are_never_made(fine_tuned, model_dir, text_file, tmp_path, monkeypatch):
    """The head gives the loss instead: the same to rounding, from validation to the last step."""
    monkeypatch.setattr(head_loss, "_LARGE_LOGITS", 0)
    shapes = []

    def cross_entropy(hidden, head, targets):
        shapes.append(tuple(hidden.shape))
        return zinf_cross_entropy(hidden, head, targets)

    zinf_cross_entropy = zinf.cross_entropy
    monkeypatch.setattr(zinf, "cross_entropy", cross_entropy)
    found = train(tmp_path / "out", model_dir, text_file)
    assert shapes == [(BATCH, SEQ, 32)] * (2 + STEPS + 2)
    assert losses(tmp_path / "out") == pytest.approx(losses(fine_tuned[0]), rel=1e-5)
    assert printed_losses(found) == pytest.approx(printed_losses(fine_tuned[1]), abs=1e-4)


@pytest.mark.parametrize(("cap", "wanted"), [(None, True), (5.0, False)])
def test_logits_that_the_model_changes_behind_its_head_are_made(cap, wanted, monkeypatch):
    monkeypatch.setattr(head_loss, "_LARGE_LOGITS", 0)
    config = transformers.Gemma2Config(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=cap,
    )  # fmt: skip
    model = zinf.shard(transformers.Gemma2ForCausalLM(config), zinf.Config(dtype=torch.float32))
    tokens = torch.arange(8).view(2, 4)
    assert head_loss.HeadLoss(model).wanted(tokens) == wanted


@pytest.mark.parametrize(
    ("asked", "free", "expected"),
    [(None, 10**9, None), (None, 10**6, "nvme"), ("none", 10**6, None), ("cpu", 10**9, "cpu")],
)
def test_blocks_are_checkpointed_where_their_activations_would_not_fit(asked, free, expected, model_dir, monkeypatch):
    from zinf.training.hugging_face import HuggingFaceModel  # which needs transformers

    monkeypatch.setattr(activation_memory, "available_memory", lambda: free)
    task = HuggingFaceModel(model_dir, "builtin", seq=SEQ)
    assert (task.layers, task.hidden) == (3, 32)
    settings = SimpleNamespace(activations=asked, batch=64, seq=SEQ, accumulate=1, preset="inf-nvme")
    ranks = SimpleNamespace(count=1, device=torch.device("cpu"))
    assert activation_memory.activations_tier(settings, task, ranks) == expected
    settings.accumulate = 64  # a sequence at a time
    assert activation_memory.activations_tier(settings, task, ranks) == (expected if asked else None)


def test_conversations_are_learnt_through_the_chat_template(model_dir, tmp_path):
    lines = [json.dumps({"messages": talk}) for talk in TALKS]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))
    found = train(tmp_path / "out", model_dir, tmp_path / "talks.jsonl")
    before, after = printed_losses(found)
    assert after < before - 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    text = "".join(f"<user>{q['content']}</s><assistant>{a['content']}</s>" for q, a in TALKS)
    tokens = np.array([token for part in text.split("</s>")[:-1] for token in tokenizer(part + "</s>")["input_ids"]])
    data = TokenData.from_tokens(tokens.astype(np.uint32))
    seen, *_ = plain_run(model_dir, data)
    assert losses(tmp_path / "out") == pytest.approx(seen, rel=1e-5)


def copy_of(model_dir, folder, **changes):
    shutil.copytree(model_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def no_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()


def no_template(folder):
    (folder / "chat_template.jinja").unlink()


def cut_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("changes", "spoil", "arguments", "words"),
    [
        ({}, lambda folder: (folder / "config.json").unlink(), (), "no config.json"),
        ({}, lambda folder: (folder / "config.json").write_text("{"), (), "config.json cannot be read"),
        ({"model_type": "nonsense"}, None, (), "nonsense"),
        ({"model_type": "t5"}, None, (), "no causal language model"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, None, (), "quantized"),
        ({"vocab_size": 100}, None, (), "the model 100 embeddings"),
        ({"hidden_size": 64}, None, (), "(300, 32) in the state, (300, 64) in the model"),
        ({"num_hidden_layers": 4}, None, (), "missing: model.layers.3"),
        ({}, no_tokenizer, (), "no tokenizer"),
        ({}, no_template, ("--data", "talk.jsonl"), "no chat template"),
        ({}, lambda folder: (folder / "model.safetensors").unlink(), (), "holds neither model.safetensors nor"),
        ({}, cut_weights, (), "model.safetensors is damaged"),
        ({}, None, ("--seq", 100), "longer than the 64 positions"),
        ({}, None, ("--data", "empty.jsonl"), "holds no document"),
        ({}, None, ("--data", "broken.jsonl"), "broken.jsonl, line 1 is no JSON"),
        ({}, None, ("--data", "binary"), "binary is no UTF-8 text"),
        ({}, None, ("--data", "absent"), "absent: No such file"),
        ({}, None, ("--seq", 60, "--data", "short"), "tokens of training text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_one_line_and_exit_2(
    changes, spoil, arguments, words, model_dir, text_file, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "broken.jsonl").write_text('{"text": ')
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": TALKS[0]}))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "short").write_text("Too short a text.")
    folder = copy_of(model_dir, tmp_path / "model", **changes) if changes else shutil.copytree(model_dir, "model")
    if spoil:
        spoil(tmp_path / "model")
    found = run("train", "--out", "out", "--model", folder, "--data", text_file, *FLAGS, "--steps", 2, *arguments)
    assert found.exit_code == 2, found.output
    assert found.stderr.splitlines()[-1].startswith("Error: ")
    assert words in found.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_without_transformers_the_extra_is_named(model_dir, tmp_path):
    script = "import sys; sys.modules['transformers'] = None; from zinf.cli import main; main()"
    command = [sys.executable, "-c", script, "train", "--out", tmp_path / "out", "--model", model_dir]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2
    assert found.stderr == "Error: a directory as --model needs transformers 5 or newer: pip install 'zinf[hf]'\n"


def test_the_gpt_needs_no_transformers(tmp_path):
    script = "import sys; import zinf.cli, zinf.training.loop; print('transformers' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert found.stdout == "False\n", found.stderr


def test_the_builtin_text_is_one_document(model_dir, tmp_path):
    found = train(tmp_path / "out", model_dir, "builtin", "--steps", 1)
    data = tokens_of(transformers.AutoTokenizer.from_pretrained(model_dir), read_text("builtin").decode())
    tokens, targets = training_batch(data, seed=0, step=0, batch=BATCH, seq=SEQ)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
    assert losses(tmp_path / "out") == pytest.approx([loss_of(model, tokens, targets).item()], rel=1e-5)
    assert printed_losses(found)[1] < printed_losses(found)[0]


@pytest.mark.peers
def test_peft_adapters_on_an_offloaded_model_train_as_on_a_plain_one(model_dir, tmp_path):
    peft = pytest.importorskip("peft")
    data = tokens_of(transformers.AutoTokenizer.from_pretrained(model_dir), TEXT)

    def adapted():
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))

    def losses_of(model, make_optimizer):
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = make_optimizer(trained, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        seen = []
        for step in range(STEPS):
            loss = loss_of(model, *training_batch(data, seed=0, step=step, batch=BATCH, seq=SEQ))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    def offloaded(place):
        config = zinf.Config(
            params=place, grads="cpu", optimizer=place, nvme=[tmp_path], dtype=torch.float32, resident=0
        )
        return zinf.shard(adapted(), config)

    on_drive = losses_of(offloaded("nvme"), zinf.AdamW)
    assert on_drive == losses_of(offloaded("device"), zinf.AdamW)
    assert on_drive == pytest.approx(losses_of(adapted(), torch.optim.AdamW), rel=1e-5)
    assert on_drive[-1] < on_drive[0]
