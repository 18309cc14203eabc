"""The counts of a compiled program, of a text whose counts are known."""

from read_hlo import Program, describe

TEXT = """\
HloModule jit_run, is_scheduled=true

%fused_cast (param_0: f32[4096,256], param_1: s32[]) -> bf16[2048,256] {
  %param_0 = f32[4096,256]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %part = f32[2048,256]{1,0} dynamic-slice(%param_0, %param_1, %zero), dynamic_slice_sizes={2048,256}
  ROOT %cast = bf16[2048,256]{1,0} convert(%part), metadata={op_name="jit(run)/while/body/cast"}
}

%fused_write (param_0.1: bf16[4096,256], param_1.1: bf16[2048,256], param_2.1: s32[]) -> bf16[4096,256] {
  %param_0.1 = bf16[4096,256]{1,0} parameter(0)
  %param_1.1 = bf16[2048,256]{1,0} parameter(1)
  %param_2.1 = s32[] parameter(2)
  ROOT %update = bf16[4096,256]{1,0} dynamic-update-slice(%param_0.1, %param_1.1, %param_2.1, %param_2.1)
}

%body (carry: (s32[], f32[4096,256], bf16[4096,256])) -> (s32[], f32[4096,256], bf16[4096,256]) {
  %carry = (s32[], f32[4096,256]{1,0}, bf16[4096,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %weights = f32[4096,256]{1,0} get-tuple-element(%carry), index=1
  %written = bf16[4096,256]{1,0} get-tuple-element(%carry), index=2
  %casting = bf16[2048,256]{1,0} fusion(%weights, %i), kind=kLoop, calls=%fused_cast
  %own = f32[4096,256]{1,0} convert(%written), metadata={op_name="of what the loop changes"}
  %writing = bf16[4096,256]{1,0} fusion(%written, %casting, %i), kind=kLoop, calls=%fused_write
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %carried = (s32[], f32[4096,256]{1,0}, bf16[4096,256]{1,0}) tuple(%next, %weights, %writing)
}

%condition (carry.1: (s32[], f32[4096,256], bf16[4096,256])) -> pred[] {
  %carry.1 = (s32[], f32[4096,256]{1,0}, bf16[4096,256]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%carry.1), index=0
  %end = s32[] constant(2)
  ROOT %less = pred[] compare(%i.1, %end), direction=LT
}

ENTRY %main (head: f32[4096,256]) -> bf16[4096,256] {
  %head = f32[4096,256]{1,0} parameter(0)
  %zero.1 = s32[] constant(0)
  %blank = bf16[] constant(0)
  %array = bf16[4096,256]{1,0} broadcast(%blank), dimensions={}
  %moved = f32[4096,256]{0,1} copy(%head), metadata={op_name="jit(run)/transpose"}
  %begin = (s32[], f32[4096,256]{1,0}, bf16[4096,256]{1,0}) tuple(%zero.1, %moved, %array)
  %loop = (s32[], f32[4096,256]{1,0}, bf16[4096,256]{1,0}) while(%begin), condition=%condition, \
body=%body, metadata={op_name="jit(run)/while"}, backend_config={"known_trip_count":{"n":"2"}}
  ROOT %result = bf16[4096,256]{1,0} get-tuple-element(%loop), index=2
}
"""


def test_kernels_are_what_runs_by_itself():
    kernels = {name: [k.by.name for k in Program(TEXT).kernels(name)] for name in ("body", "main")}
    assert kernels == {"body": ["casting", "own", "writing", "next"], "main": ["array", "moved"]}


def test_an_update_in_place_writes_what_it_updates():
    written = {k.by.name: k.written_mib for k in Program(TEXT).kernels("body")}
    assert written == {"casting": 1.0, "own": 4.0, "writing": 1.0, "next": 4 / 2**20}


def test_a_description_names_trips_casts_copies_and_what_is_large():
    told = describe(TEXT, limit_mib=2)
    (loop,) = told["loops"]
    assert (loop["source"], loop["depth"], loop["trips"], loop["kernels"]) == ("jit(run)/while", 0, 2, 4)
    assert loop["written_mib"] == 6
    assert loop["large"] == {"of what the loop changes": 4}
    # The weights are the same in every round; what the loop writes has to be read as it is then.
    assert loop["casts"] == {"jit(run)/while/body/cast": 1.0}
    assert told["copies"] == {"copy jit(run)/transpose": 4}
    assert told["kernels"] == 6


def test_a_loop_whose_rounds_are_not_known():
    (loop,) = describe(TEXT.replace("known_trip_count", "trip_count"), limit_mib=2)["loops"]
    assert loop["trips"] is None
