"""What the GPU check reads from traces of JAX's profiler and from compiled programs, in the form that GPUs give them."""

from __future__ import annotations

import gzip
import json

import jax.numpy as jnp
import pytest

import jax_mlp_offload as jmo
from benchmarks import workload
from benchmarks.gpu import schedule, timeline
from benchmarks.gpu.settings import NotMeasured
from jax_mlp_offload import accelerators

# -- traces


def _process(pid, name):
    return {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}


def _thread(pid, tid, name):
    return {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}


def _span(pid, tid, name, begin_us, duration_us, **args):
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": begin_us, "dur": duration_us, "args": args}


def _copy_args(source, target, size_bytes):
    return {"memcpy_details": f"kind_src:{source} kind_dst:{target} size:{size_bytes} dest:0 async:1"}


TRACE = {
    "displayTimeUnit": "ns",
    "metadata": {"highres-ticks": True},
    "traceEvents": [
        _process(1, "/device:GPU:0"),
        {"ph": "M", "pid": 1, "name": "process_sort_index", "args": {"sort_index": 1}},
        _process(2, "/device:GPU:1"),
        _process(701, "/host:CPU"),
        _thread(1, 13, "Stream #13(Compute,MemcpyD2D)"),
        _thread(1, 20, "Stream #20(MemcpyD2H)"),
        _thread(1, 21, "Stream #21(MemcpyH2D)"),
        _thread(1, 22, "Stream #22(Compute)"),
        _thread(1, 4294967, "XLA Ops"),
        _thread(2, 13, "Stream #13(Compute)"),
        _thread(701, 9, "python"),
        _span(1, 13, "loop_fusion_kernel", 0.0, 100.0, hlo_module="jit_step", hlo_op="fusion.3"),
        _span(1, 13, "Memset 4", 100.0, 1.0),
        _span(1, 13, "nvjet_tst_128x64", 120.0, 80.0),  # of a graph: without the names of its ops
        _span(1, 13, "MemcpyD2D", 200.0, 10.0, **_copy_args("device", "device", 64)),
        _span(1, 20, "MemcpyD2H", 50.0, 100.0, **_copy_args("device", "pinned", 4000)),
        _span(1, 20, "MemcpyD2H", 150.0, 100.0, **_copy_args("device", "pinned", 6000)),
        _span(1, 21, "graph copy", 250.0, 50.0, **_copy_args("pinned", "device", 5000)),
        _span(1, 22, "update_kernel", 180.0, 40.0),
        _span(1, 4294967, "fusion.3", 0.0, 400.0, hlo_module="jit_step", hlo_op="fusion.3"),  # the same time again
        _span(2, 13, "loop_fusion_kernel", 0.0, 1000.0, hlo_module="jit_step"),
        _span(701, 9, "cuGraphLaunch", 90.0, 5.0),
        _span(701, 9, "PjitFunction(step)", 0.0, 5.0),
        {},
    ],
}


def test_trace_tells_copies_from_kernels():
    found = timeline.events(TRACE)
    kinds = [event.kind for event in found]
    assert [kinds.count(kind) for kind in (timeline.TO_HOST, timeline.TO_DEVICE, timeline.ON_DEVICE)] == [2, 1, 1]
    assert kinds.count(timeline.KERNEL) == 3
    assert [event.of_xla for event in found if event.kind == timeline.KERNEL] == [True, True, False]
    assert len(timeline.events(TRACE, device=1)) == 1
    assert timeline.graph_launches(TRACE) == 1


def test_overlap_of_copies_with_compute():
    figures = timeline.overlap(timeline.events(TRACE))
    assert figures["compute_s"] == pytest.approx(180e-6)
    assert figures["window_s"] == pytest.approx(300e-6)
    assert figures["idle_share"] == pytest.approx(0.0)
    # copies from 50 to 250 µs, compute from 0 to 100 and 120 to 200: 130 of 200
    assert figures["to_host"] == {
        "events": 2,
        "bytes": 10000,
        "seconds": pytest.approx(200e-6),
        "overlapped": pytest.approx(0.65),
    }
    assert figures["to_device"]["overlapped"] == 0.0
    assert figures["update"]["overlapped"] == pytest.approx(0.5)


def test_trace_without_a_gpu_gives_no_figure():
    with pytest.raises(NotMeasured, match="no stream of GPU 0"):
        timeline.events({"traceEvents": [_process(701, "/host:CPU"), _span(701, 9, "step", 0.0, 1.0), {}]})


def test_spans_of_time():
    assert timeline.union([(3, 4), (0, 1), (1, 2), (0.5, 1.5), (7, 7)]) == [(0, 2), (3, 4)]
    assert timeline.intersection([(0, 2), (3, 5)], [(1, 4), (4.5, 9)]) == [(1, 2), (3, 4), (4.5, 5)]
    assert timeline.length([(0, 2), (3, 4)]) == 3


def test_the_newest_trace_is_read(tmp_path):
    for run, count in (("2026_01_01", 1), ("2026_01_02", 2)):
        folder = tmp_path / "plugins" / "profile" / run
        folder.mkdir(parents=True)
        for name in ("host.trace.json.gz", "perfetto_trace.json.gz"):
            size = count if name.startswith("host") else 0
            with gzip.open(folder / name, "wt") as file:
                json.dump({"traceEvents": [{}] * size}, file)
    assert len(timeline.read(tmp_path)["traceEvents"]) == 2
    with pytest.raises(FileNotFoundError, match="left no"):
        timeline.read(tmp_path / "plugins")


def test_a_real_trace_is_read():
    with timeline.traced() as trace:
        jnp.ones(8).block_until_ready()
    assert any(event.get("ph") == "X" for event in trace["traceEvents"])
    assert timeline.graph_launches(trace) == 0


# -- schedules


SCHEDULED = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%fused_a (param_0.1: bf16[4,8]) -> bf16[4,8] {
  %param_0.1 = bf16[4,8]{1,0} parameter(0)
  ROOT %negate.1 = bf16[4,8]{1,0} negate(%param_0.1)
}

%command_buffer (p.1: bf16[4,8]) -> (bf16[4,8]) {
  %p.1 = bf16[4,8]{1,0} parameter(0)
  %late_gradient.0 = bf16[4,8]{1,0} fusion(%p.1), kind=kLoop, calls=%fused_a, metadata={op_name="jit(step)/transpose(jvp())"}
  ROOT %tuple.1 = (bf16[4,8]{1,0}) tuple(%late_gradient.0)
}

ENTRY %main.6 (x.1: bf16[4,8], ticket.1: u32[1], /*index=2*/w.1: bf16[4,8]) -> (bf16[4,8], u32[1]) {
  %x.1 = bf16[4,8]{1,0} parameter(0), metadata={op_name="x"}
  %ticket.1 = u32[1]{0} parameter(1)
  %w.1 = bf16[4,8]{1,0} parameter(2), sharding={replicated}
  %gradient.2 = (bf16[16,8]{1,0}, s8[0]{0}) custom-call(%x.1, %w.1), custom_call_target="__cublas$gemm"
  %get-tuple-element.1 = bf16[16,8]{1,0} get-tuple-element(%gradient.2), index=0
PUSH_2_EARLY
  %gradient.1 = bf16[4,8]{1,0} fusion(%get-tuple-element.1), kind=kLoop, calls=%fused_a
  %ffi_call.1 = (u32[1]{0}, bf16[4,8]{1,0}) custom-call(%ticket.1, %gradient.1, %w.1), custom_call_target="jmo_push"
  %call = (bf16[4,8]{1,0}) call(%gradient.1), to_apply=%command_buffer
  %get-tuple-element.2 = bf16[4,8]{1,0} get-tuple-element(%call), index=0
PUSH_2_LATE
  %ffi_call.0 = (u32[1]{0}, bf16[4,8]{1,0}) custom-call(%ticket.1, %get-tuple-element.2, %w.1), custom_call_target="jmo_push"
  %get-tuple-element.3 = bf16[4,8]{1,0} get-tuple-element(%ffi_call.0), index=1
  %ffi_call.9 = (u32[1]{0}, bf16[4,8]{1,0}) custom-call(%ticket.1, %get-tuple-element.3, %w.1), custom_call_target="jmo_pull"
  %get-tuple-element.4 = bf16[4,8]{1,0} get-tuple-element(%ffi_call.9), index=1
  ROOT %tuple.2 = (bf16[4,8]{1,0}, u32[1]{0}) tuple(%get-tuple-element.4, %ticket.1)
}
"""
_PUSH_2 = (
    "  %ffi_call.2 = (u32[1]{0}, bf16[16,8]{1,0}) custom-call(%ticket.1, %get-tuple-element.1, %w.1), "
    'custom_call_target="jmo_push"'
)


def _scheduled(early):
    text = SCHEDULED.replace("PUSH_2_EARLY\n", f"{_PUSH_2}\n" if early else "")
    return text.replace("PUSH_2_LATE\n", "" if early else f"{_PUSH_2}\n")


def test_pushes_at_once_are_early():
    found = schedule.placement(_scheduled(early=True))
    assert (found["pushes"], found["pulls"], found["could_be_early"], found["early"]) == (3, 1, 2, 2)
    assert found["early_bytes_share"] == 1.0
    assert found["most_late"] == 0
    assert found["pulls_behind_all_pushes"]


def test_a_push_behind_the_last_gradient_is_late():
    found = schedule.placement(_scheduled(early=False))
    assert (found["could_be_early"], found["early"]) == (2, 1)
    small, large = (4 + 2 * 4 * 8, 4 + 2 * 16 * 8)
    assert found["early_bytes_share"] == pytest.approx(small / (small + large))
    # the other gradient, its push, what stands in the command buffer, and the buffer
    assert found["most_late"] == 4


def test_computations_of_a_module():
    found, entry = schedule.computations(_scheduled(early=True))
    assert entry == "main.6"
    assert set(found) == {"fused_a", "command_buffer", "main.6"}
    gemm = found["main.6"][3]
    assert (gemm.operation, gemm.target, gemm.operands) == ("custom-call", "__cublas$gemm", ("x.1", "w.1"))
    assert gemm.result_bytes == 2 * 16 * 8
    assert [each.called for each in found["main.6"] if each.called] == ["command_buffer"]


def test_what_is_no_schedule_is_refused():
    with pytest.raises(ValueError, match="not scheduled"):
        schedule.placement("HloModule jit_step, entry_computation_layout={()}\n")
    with pytest.raises(ValueError, match="no ENTRY"):
        schedule.computations("HloModule jit_step, is_scheduled=true\n")
    with pytest.raises(NotMeasured, match="no jmo_push"):
        schedule.placement(
            "HloModule a, is_scheduled=true\nENTRY %m (x: f32[]) -> f32[] {\n  %x = f32[] parameter(0)\n}\n"
        )


def test_schedule_of_a_real_program():
    load = workload.Workload.of(4 * 64 * 64, 4, jnp.bfloat16, 1)
    with accelerators.emulate(1), jmo.Store(subgroup_elements=4096) as store:
        tx = jmo.adamw(1e-3, store=store)
        params = load.draw(0, 0.1)
        step = workload.train_step(tx, load.loss)
        text = step.lower(params, tx.init(params), load.batch()).compile().as_text()
    found = schedule.placement(text)
    assert (found["pushes"], found["pulls"]) == (4, 4)
    assert found["could_be_early"] == 3
    assert 0 <= found["early"] <= 3
    assert found["pulls_behind_all_pushes"]
