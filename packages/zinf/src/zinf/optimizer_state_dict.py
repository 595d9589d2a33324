"""AdamW.load_state_dict(): a state dict of torch.optim.AdamW into states on their tiers, one parameter at a time.

The other way would gather every moment of the model into one process's memory: `zinf.save` streams them instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .parameter_state import set_full_state
from .unit_states import MOMENTS

if TYPE_CHECKING:
    from .offloaded_adamw import AdamW

NOT_HERE = (
    "the state dict has step counters but no moments, as zinf.AdamW.state_dict() gives it: moments stay on their "
    "tiers. Keep them with zinf.save(dir, model, optimizer) and take them up with zinf.load"
)


def load(optimizer: AdamW, state_dict: Mapping[str, Any]) -> None:
    """Replace settings, counters and moments by those of a torch.optim.AdamW's state dict, of whole parameters.

    ValueError for other groups; RuntimeError where moments are missing. Nothing is changed then.
    """
    groups, states = state_dict["param_groups"], state_dict["state"]
    sizes = [len(group["params"]) for group in groups]
    own_sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own_sizes:
        raise ValueError(f"the state dict has parameter groups of {sizes} parameters, the optimizer of {own_sizes}")
    if any(group.get("amsgrad") or group.get("maximize") for group in groups):
        raise ValueError("the state dict is of an AdamW with amsgrad or maximize, which zinf.AdamW has not")
    places = list(_places(optimizer, groups))
    for _, number in places:
        state = states.get(number, {})
        if int(state.get("step", 0)) and not state.keys() >= set(MOMENTS):
            raise RuntimeError(NOT_HERE)
    for param, number in places:
        state = states.get(number, {})
        if state.keys() >= set(MOMENTS):
            set_full_state(param, {kind: state[kind] for kind in (*MOMENTS, "step")})
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: saved[key] for key in saved if key in group and key != "params"})


def _places(optimizer: AdamW, groups: list[dict[str, Any]]) -> Iterator[tuple[Tensor, int]]:
    """Each parameter, and its number in the state dict."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        yield from zip(group["params"], saved["params"], strict=True)
