"""The names of models that the command line understands: "gpt2-124m", "gpt:layers=4,hidden=768,heads=12", a folder."""

from __future__ import annotations

import json
from pathlib import Path

from zinf.models.gpt import GPTConfig

BYTE_VOCAB = 256
BUILTIN_MODEL = "gpt:layers=4,hidden=768,heads=12,vocab=256"  # 28 million parameters

_GPT2_SIZES = {  # layers, hidden, heads of the published GPT-2 models
    "gpt2-124m": (12, 768, 12),
    "gpt2-355m": (24, 1024, 16),
    "gpt2-774m": (36, 1280, 20),
    "gpt2-1558m": (48, 1600, 25),
}
_GPT2_VOCAB, _GPT2_POSITIONS = 50257, 1024


def parse_model(name: str, *, positions: int) -> GPTConfig:
    """The configuration that a model's name stands for.

    `positions` is the length of the sequences to be read; the published models keep their own 1,024 where that is
    enough. Raises ValueError, saying what is accepted, for any other name and for sizes that make no model.
    """
    if name in _GPT2_SIZES:
        layers, hidden, heads = _GPT2_SIZES[name]
        return GPTConfig(layers=layers, hidden=hidden, heads=heads, vocab=_GPT2_VOCAB,
                         positions=max(positions, _GPT2_POSITIONS))  # fmt: skip
    family, colon, sizes = name.partition(":")
    if family != "gpt" or not colon:
        raise ValueError(f"model {name!r} is not known: give {accepted_models()}")
    given = _parse_sizes(name, sizes)
    return GPTConfig(
        layers=given["layers"],
        hidden=given["hidden"],
        heads=given["heads"],
        vocab=given["vocab"],
        positions=positions,
    )


def parse_sizes(name: str, *, positions: int) -> dict[str, int]:
    """{"layers", "hidden", "heads"} of a model by name, or of a directory in Hugging Face's layout.

    Raises ValueError where a name or a configuration does not say.
    """
    if not Path(name).is_dir():
        config = parse_model(name, positions=positions)
        return {"layers": config.layers, "hidden": config.hidden, "heads": config.heads}
    path = Path(name) / "config.json"
    try:
        given = json.loads(path.read_bytes())
        return {size: int(given[key]) for size, key in _HUGGING_FACE_SIZES.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        keys = ", ".join(_HUGGING_FACE_SIZES.values())
        raise ValueError(f"{path} does not say {keys}: {error!r}") from error


_HUGGING_FACE_SIZES = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}


def accepted_models() -> str:
    """What `parse_model` accepts, in words."""
    return f"one of {', '.join(_GPT2_SIZES)}, or gpt:layers=L,hidden=H,heads=A[,vocab=V], or a directory"


def _parse_sizes(name: str, text: str) -> dict[str, int]:
    sizes = {"vocab": BYTE_VOCAB}
    for item in text.split(","):
        key, _, value = item.partition("=")
        if key not in ("layers", "hidden", "heads", "vocab") or not value.isdecimal():
            raise ValueError(f"model {name!r}: cannot read {item!r}; write gpt:layers=L,hidden=H,heads=A[,vocab=V]")
        sizes[key] = int(value)
    missing = {"layers", "hidden", "heads"} - sizes.keys()
    if missing:
        raise ValueError(f"model {name!r} does not say {' and '.join(sorted(missing))}")
    return sizes
