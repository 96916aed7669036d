"""How large a subgroup is, and how many slots a device gets.

A subgroup is as large as it may be (few large transfers) while start-up and tail of a phase, ``b·(1/X_slowest + 1/ΣX)``
for records of b bytes and tiers of bandwidth X, stay under 3 % of the phase, and at least four slots a tier remain. Near
that size the one that wastes least of the slots is taken (leaves seldom are multiples of anything). Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jax_mlp_offload.plan import MAX_SUBGROUP_ELEMENTS, MIN_RECORD_BYTES, Plan
from jax_mlp_offload.sizes import format_bytes

_TAIL = 0.03
_SLOTS_A_TIER = 4
_SLOTS_A_DEVICE = 2
_CANDIDATES = 24


@dataclasses.dataclass(frozen=True, slots=True)
class Sizing:
    """The plan, the size of a slot in bytes, and the number of slots of each device."""

    plan: Plan
    slot_bytes: int
    slots: int


def least_slots(tiers: int, devices: int) -> int:
    """Slots of each device that keep every tier busy, where the user sets no memory."""
    return max(_SLOTS_A_TIER * tiers // devices, _SLOTS_A_TIER)


def choose(
    plan_with: Callable[[int], Plan],
    devices: int,
    host_bytes: int | None,
    subgroup_elements: int | None,
    tier_speeds: Sequence[float],
) -> Sizing:
    """Chooses plan and slots.

    Args:
      plan_with: makes the plan of one device for a number of elements a subgroup.
      devices: number of devices.
      host_bytes: memory for slots, over all devices; None: what is needed (no tiers) or the least that runs well.
      subgroup_elements: set by the user, or None.
      tier_speeds: relative bandwidth of each tier; empty: no tiers.

    Raises:
      ValueError: if the memory is too small; names what is needed.
    """
    if subgroup_elements is not None:
        plan = plan_with(subgroup_elements)
    else:
        plan = _plan_for(plan_with, devices, host_bytes, tier_speeds)
    slot_bytes = plan.largest_record_bytes
    tiers = len(tier_speeds)
    if host_bytes is None:
        slots = plan.records if tiers == 0 else least_slots(tiers, devices)
    else:
        slots = host_bytes // (slot_bytes * devices)
    least = min(plan.records, _SLOTS_A_DEVICE if tiers else plan.records)
    if slots < least:
        raise ValueError(_too_small(plan, devices, host_bytes or 0, least, tiers, subgroup_elements))
    return Sizing(plan, slot_bytes, min(slots, plan.records))


def _plan_for(
    plan_with: Callable[[int], Plan], devices: int, host_bytes: int | None, tier_speeds: Sequence[float]
) -> Plan:
    whole = plan_with(MAX_SUBGROUP_ELEMENTS)
    elements = sum(leaf.elements for leaf in whole.leaves)
    if elements == 0:
        return whole
    element_bytes = whole.state_bytes / elements
    state_bytes = whole.state_bytes * devices
    tiers = len(tier_speeds)
    if tiers == 0 or (host_bytes is not None and state_bytes <= host_bytes * 0.9):
        # everything stays in memory: subgroups only serve to keep the kernel threads and the program overlapped
        most_bytes = whole.state_bytes / 16
    else:
        kept = 0 if host_bytes is None else min(host_bytes, state_bytes)
        spread = sum(tier_speeds) / min(tier_speeds) + 1
        most_bytes = _TAIL * max(state_bytes - kept, 0.1 * state_bytes) / spread
        if host_bytes is not None:
            most_bytes = min(most_bytes, host_bytes / max(_SLOTS_A_TIER * tiers, _SLOTS_A_DEVICE * devices))
    most = int(max(most_bytes, MIN_RECORD_BYTES) / element_bytes)
    most = max(1, min(most, MAX_SUBGROUP_ELEMENTS))
    candidates = (plan_with(max(1, most * (2 * _CANDIDATES - i) // (2 * _CANDIDATES))) for i in range(_CANDIDATES))
    return min(candidates, key=lambda plan: plan.records * plan.largest_record_bytes)


def _too_small(plan: Plan, devices: int, host_bytes: int, least: int, tiers: int, subgroup_elements: int | None) -> str:
    needed = least * plan.largest_record_bytes * devices
    text = (
        f"host_memory={format_bytes(host_bytes)} is too small: {devices} device(s) need {least} slots of "
        f"{format_bytes(plan.largest_record_bytes)} each, {format_bytes(needed)} ({needed} bytes) in all; "
    )
    if tiers == 0:
        return text + "without tiers the whole state is kept in memory. Raise host_memory, or give the store a tier"
    if subgroup_elements is not None:
        return text + f"raise host_memory, or lower subgroup_elements={subgroup_elements}"
    return text + "raise host_memory, or set a smaller subgroup_elements"
