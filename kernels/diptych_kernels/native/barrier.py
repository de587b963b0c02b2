"""The barrier at which the threads of a kernel wait for each other, some hundred times per step.

GOMP's own barrier spins for milliseconds. Where other work keeps a processor busy, Linux may put
two of a kernel's threads on the same one: then each waits at every barrier until the other's time
slice is over, and a step takes a second. This one spins for some microseconds, and then lets
whoever else wants the processor go first.
"""

from __future__ import annotations

import ctypes
from functools import cache

import llvmlite.binding as llvm

SPINS = 1000
"""How often a thread spins, for about ten nanoseconds each, before it yields the processor. Threads
that really run wait for each other about as long."""
TEXT = """
declare i32 @omp_get_num_threads()
declare i32 @sched_yield()
declare void @llvm.x86.sse2.pause()

@arrived = internal global i64 0, align 64
@round = internal global i64 0, align 64

define void @await_others() {{
    %threads = call i32 @omp_get_num_threads()
    %last = sext i32 %threads to i64
    %own_round = load atomic i64, ptr @round acquire, align 8
    %before = atomicrmw add ptr @arrived, i64 1 acq_rel
    %count = add i64 %before, 1
    %is_last = icmp eq i64 %count, %last
    br i1 %is_last, label %release, label %wait

release:
    store atomic i64 0, ptr @arrived monotonic, align 8
    %next_round = add i64 %own_round, 1
    store atomic i64 %next_round, ptr @round release, align 8
    ret void

wait:
    %spins = phi i64 [0, %0], [%more, %spin], [%spins, %yield]
    %current = load atomic i64, ptr @round acquire, align 8
    %released = icmp ne i64 %current, %own_round
    br i1 %released, label %end, label %again

again:
    %is_long = icmp eq i64 %spins, {spins}
    br i1 %is_long, label %yield, label %spin

spin:
    call void @llvm.x86.sse2.pause()  ; tells the processor that its thread only waits
    %more = add i64 %spins, 1
    br label %wait

yield:
    %ignored = call i32 @sched_yield()
    br label %wait

end:
    ret void
}}
"""


@cache
def barrier() -> llvm.ExecutionEngine:
    """Return a module with the function `await_others`. The linker must know `omp_get_num_threads`.

    There is one barrier, so kernels must run one after the other.
    """
    sched_yield = ctypes.CDLL(None).sched_yield
    llvm.add_symbol("sched_yield", ctypes.cast(sched_yield, ctypes.c_void_p).value)
    text = TEXT.format(spins=SPINS)
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), machine)
    engine.finalize_object()
    return engine
