"""Loss scaling of float16 runs: a static number, or one that adapts to overflows."""

from __future__ import annotations

_GROWTH_STEPS = 2000  # good steps after which the scale is doubled, as in torch.amp.GradScaler


class LossScale:
    """The number by which a loss is multiplied before backward.

    setting   None: 1. A number: that. "dynamic": halved at every overflow, doubled after 2,000 good steps.
    """

    def __init__(self, setting: float | str | None):
        self.dynamic = setting == "dynamic"
        self.value = 65536.0 if self.dynamic else float(setting or 1.0)
        self._good_steps = 0

    def stepped(self, overflow: bool) -> None:
        """Tell whether the last step's gradients overflowed."""
        if not self.dynamic:
            return
        if overflow:
            self.value = max(self.value / 2, 1.0)
            self._good_steps = 0
        else:
            self._good_steps += 1
            if self._good_steps >= _GROWTH_STEPS:
                self.value *= 2
                self._good_steps = 0

    def state(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self._good_steps}

    def load(self, state: dict[str, float]) -> None:
        self.value = float(state["value"])
        self._good_steps = int(state["good_steps"])
