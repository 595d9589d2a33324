"""CPUAdam: torch.optim.AdamW, stepped by cpu_adam.

State dicts go both ways between CPUAdam and torch.optim.AdamW: the keys and their meaning are torch's.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch
from torch import Tensor

import cpu_adam
from cpu_adam.scalars import scheduled_rate

PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CPUAdam(torch.optim.Optimizer):
    """AdamW (`decoupled=True`) or Adam with L2 (`decoupled=False`) for parameters on the CPU, in place.

    The arguments are torch.optim.AdamW's, and:

    decoupled   False: weight decay is added to the gradient, as torch.optim.Adam does.
    master      True: bfloat16 and float16 parameters are rounded copies of fp32 masters. A bfloat16 parameter
                is itself the high half of its master, the 16-bit remainder is in the state ("param_lo", int16);
                a float16 one has its master there ("param_fp32"). False: no master; updates below half a unit
                in the parameter's last place vanish, and with them small learning rates and weight decay.
    threads     as `cpu_adam.step`'s.

    `foreach` and `fused` choose among torch's own implementations; here they change nothing. `amsgrad`, `capturable`
    and `differentiable` are refused (ValueError).

    state[p]: "step" (0-dim float32), "exp_avg" and "exp_avg_sq" (float32, shape and strides of p), and what
    `master` adds. Moments are float32 also for 16-bit parameters. Who writes new values into a 16-bit parameter
    from outside should drop its remainder or master: `del optimizer.state[p]["param_lo"]`.

    A gradient may be float32, bfloat16 or float16 and have any strides; it is read by logical index.
    torch.amp.GradScaler works.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled: bool = True,
        master: bool = True,
        threads: int | None = None,
    ) -> None:
        _require_settings(lr, betas, eps, weight_decay)
        # The names are those torch.optim.AdamW reads when it loads our state dict.
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled,
            "master": master,
        }
        _require_implemented(defaults)
        self.threads = threads
        super().__init__(params, defaults)

    # torch.amp.GradScaler then sets `grad_scale` and `found_inf` for the time of a step and leaves unscaling to us,
    # which costs nothing: it is one factor in the pass that is made anyway.
    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step for every parameter that has a gradient; returns the closure's loss.

        Raises TypeError for a parameter or gradient that is complex, sparse, not on the CPU or of another dtype, and
        ValueError for a group's setting that is out of range, before any parameter was touched.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and found_inf.item() != 0:
            return loss
        unscale = 1.0 if scale is None else 1.0 / scale.item()

        for g, group in enumerate(self.param_groups):
            _require_settings(scheduled_rate(group["lr"]), group["betas"], group["eps"], group["weight_decay"])
            for i, p in enumerate(group["params"]):
                _require_updatable(p, f"parameter {i} of group {g}")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group, -unscale if group["maximize"] else unscale)
        return loss

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any], grad_scale: float) -> None:
        state = self._state_of(p, group["master"])
        order = _memory_order(p)
        flat = p.permute(order)
        param = flat.contiguous()  # a copy only where elements of p lie apart or on one another

        def beside_param(key: str) -> Tensor | None:
            if key not in state:
                return None
            tensor = state[key].permute(order)
            if not tensor.is_contiguous():  # p lay otherwise in memory when this was made
                tensor = tensor.contiguous()
                state[key] = tensor.permute(_inverse(order))
            return tensor

        master = beside_param("param_fp32")
        cpu_adam.step(
            param if master is None else master,
            grad.permute(order).contiguous(),
            beside_param("exp_avg"),
            beside_param("exp_avg_sq"),
            step=int(state["step"].item()) + 1,
            lr=scheduled_rate(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled_weight_decay"],
            grad_scale=grad_scale,
            param_lo=beside_param("param_lo"),
            param_out=None if master is None else param,
            threads=self.threads,
        )
        state["step"] += 1
        if param.data_ptr() == flat.data_ptr():
            # Written behind autograd's back: a graph that still needs the old values must notice.
            torch.autograd.graph.increment_version(p)
        else:
            flat.copy_(param)

    def _state_of(self, p: Tensor, master: bool) -> dict[str, Any]:
        """The state of `p`, completed: at its first step, and where a loaded one came from torch or had no master."""
        state = self.state[p]
        if not isinstance(state.get("step"), Tensor):
            state["step"] = torch.tensor(float(state.get("step", 0.0)), dtype=torch.float32)
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                state[key] = torch.zeros_like(p, dtype=torch.float32)
        # What a master of another dtype has left, where the parameter's has changed or a run of another was loaded.
        if not master or p.dtype is not torch.bfloat16:
            state.pop("param_lo", None)
        if not master or p.dtype is not torch.float16:
            state.pop("param_fp32", None)
        if master and p.dtype is torch.bfloat16 and "param_lo" not in state:
            state["param_lo"] = torch.zeros_like(p, dtype=torch.int16)  # a master of exactly p's value
        if master and p.dtype is torch.float16 and "param_fp32" not in state:
            state["param_fp32"] = p.detach().to(torch.float32, memory_format=torch.preserve_format)
        return state

    # ---- state dicts ----

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of CPUAdam, torch.optim.AdamW or torch.optim.Adam. Tensors are copied.

        Group settings come with it, as with every torch optimizer. Raises ValueError for an amsgrad run, and for state
        of another shape than its parameter's; then nothing is loaded.
        """
        for group in state_dict["param_groups"]:
            _require_implemented(group)
        saved_ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(saved_ids, params, strict=False):  # torch says when their numbers differ
            _require_state_of(p, index, state_dict["state"].get(index, {}))
        super().load_state_dict(state_dict)
        # torch has cast all state to each parameter's dtype, which would round moments of 16-bit parameters and
        # destroy remainders: take them from the source once more, in the dtype and memory order they have here.
        for index, p in zip(saved_ids, params, strict=True):
            for key, dtype in STATE_DTYPES.items():
                value = state_dict["state"].get(index, {}).get(key)
                if value is not None:
                    self.state[p][key] = torch.zeros_like(p, dtype=dtype).copy_(value)
            step = state_dict["state"].get(index, {}).get("step")
            if step is not None:
                self.state[p]["step"] = torch.tensor(float(step), dtype=torch.float32)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("threads", None)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)  # a state dict of torch's lacks ours


STATE_DTYPES = {
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
    "param_lo": torch.int16,
    "param_fp32": torch.float32,
}


_NOTHING = [numpy.empty(0, numpy.float32) for _ in range(4)]


def _require_settings(lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Refuses at construction what `cpu_adam.step` would refuse later: a step on no elements checks it all."""
    cpu_adam.step(*_NOTHING, step=1, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)  # type: ignore[arg-type]


def _require_implemented(group: dict[str, Any]) -> None:
    for key in ("amsgrad", "capturable", "differentiable"):
        if group.get(key):
            raise ValueError(f"CPUAdam does not implement {key}=True; use torch.optim.AdamW for that")


def _require_state_of(p: Tensor, index: int, state: dict[str, Any]) -> None:
    for key in STATE_DTYPES:
        found, needed = state.get(key), tuple(p.shape)
        if found is not None and tuple(found.shape) != needed:
            raise ValueError(f"{key} of parameter {index} has shape {tuple(found.shape)}, the parameter {needed}")


def _require_updatable(p: Tensor, name: str) -> None:
    if p.grad is None:
        return
    for tensor, what in ((p, name), (p.grad, f"the gradient of {name}")):
        if tensor.layout is not torch.strided:
            raise TypeError(f"{what} is sparse ({tensor.layout}); CPUAdam takes dense ones, SparseAdam sparse")
        if tensor.is_complex():
            raise TypeError(f"{what} is complex ({tensor.dtype}); CPUAdam takes real ones, AdamW complex")
        if tensor.device.type != "cpu":
            raise TypeError(f"{what} is on device {tensor.device}; CPUAdam works on the CPU")
        if tensor.dtype not in PARAM_DTYPES:
            raise TypeError(f"{what} has dtype {tensor.dtype}; CPUAdam takes float32, bfloat16 and float16")
        if tensor.numel() and not tensor.data_ptr():
            kind = type(tensor).__name__
            raise TypeError(f"{what} is a {kind} without memory of its own; CPUAdam takes plain tensors")


def _memory_order(p: Tensor) -> list[int]:
    """Dimensions from the largest stride to the smallest: permuted so, every dense tensor is contiguous, a
    channels-last one too. Other tensors permuted alike correspond by logical index."""
    return sorted(range(p.ndim), key=lambda dim: (p.stride(dim), p.shape[dim]), reverse=True)


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
