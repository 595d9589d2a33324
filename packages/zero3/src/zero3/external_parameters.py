"""Parameters used outside the module that owns them (paper, 7.1.1).

Three routes. By hand: `register_external` makes a module hold the parameter's unit while it runs. By access: a
released parameter that is touched from anywhere gathers its unit (parameter_forms.py reports it). By return: a
partitioned parameter that a forward returns is touched by whoever uses it next, which is the same.
"""

from __future__ import annotations

from torch import Tensor, nn

from . import hooks, parameter_forms
from .tiles import tiles_of


def register_external(module: nn.Module, param: Tensor) -> None:
    """Gather `param` whenever `module` runs forward, though another module owns it.

    Not needed for correctness: an access from anywhere is noticed. It spares the notice (microseconds a call).
    TypeError when `param` belongs to no partitioned model.
    """
    if tiles_of(param) is not None:  # gathers each tile in its turn, whoever uses it
        return
    slot = parameter_forms.slot_of(param)
    if not slot.unit.plain:
        hooks.add_units(slot.unit.model, module, [slot.unit])
