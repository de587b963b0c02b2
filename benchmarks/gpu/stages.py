"""The stages, in the order of what is worth most when a run breaks off."""

from __future__ import annotations

from dataclasses import dataclass

TOTAL_S = 480


@dataclass(frozen=True, slots=True)
class Stage:
    """A process of its own, so that a failure costs only itself."""

    name: str
    function: str
    """In a module beside this one, as `module:function`."""
    seconds: int
    """It is killed when they are over."""


STAGES = {
    1: Stage("imports and compiles", "first:imports_and_compiles", 35),
    2: Stage("ceilings", "first:ceilings_of_the_machine", 15),
    3: Stage("kernels beside float64", "kernel_stages:beside_float64", 20),
    4: Stage("tests of the kernels", "kernel_stages:tests_of_kernels", 100),
    5: Stage("graphs, sleep and wake", "engine_stages:graphs_and_sleep", 20),
    6: Stage("steps of an 8B shape", "kernel_stages:steps_of_8b", 20),
    7: Stage("kernels beside torch", "kernel_stages:beside_torch", 35),
    8: Stage("a whole engine", "engine_stages:whole_engine", 20),
    9: Stage("block copies", "engine_stages:block_copies", 15),
    10: Stage("experts and adapters", "engine_stages:experts_and_adapters", 25),
    11: Stage("prefill and decode on one GPU", "engine_stages:hand_off", 35),
    12: Stage("a service of processes", "service_stage:service_of_processes", 25),
    13: Stage("KV in eight bits", "engine_stages:kv_in_eight_bits", 20),
    14: Stage("guessed tokens", "engine_stages:guesses", 30),
    15: Stage("packed products", "kernel_stages:packed_products", 30),
    16: Stage("a packed engine", "engine_stages:packed_engine", 35),
}


def chosen(text: str) -> list[int]:
    """Numbers of stages from `3,6`; all for nothing. Raises `SystemExit` for one that is none."""
    numbers = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [number for number in numbers if number not in map(str, STAGES)]
    if unknown:
        raise SystemExit(f"no stage {', '.join(unknown)}: STAGES takes numbers 1 to {len(STAGES)}")
    return [int(number) for number in numbers] or list(STAGES)
