"""The structures of `source/interface.h` that a plan consists of, with the same names."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from enum import IntEnum

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
"""Numbers of `DType`."""

ROUNDED, UNROUNDED, ONE_MORE, LAYER = range(4)
"""Numbers of `NormKind`."""


class Pairing(IntEnum):
    """The two elements of a head that a frequency rotates. See `source/interface.h`."""

    HALVES = 0
    INTERLEAVED = 1
    INTERLEAVED_TO_HALVES = 2


FUNCTIONS = {"identity": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4, "squared_relu": 5, "sigmoid": 6, "tanh": 7}
FUNCTIONS |= {"softplus": 8, "limited_silu": 9, "limited_and_one": 10, "expm1_excess": 11}
"""Numbers of `Function`."""

LOOK_UP, PICK, NORM, PRODUCT, DENSE, ANGLES, NORM_ROTATE_STORE, ATTEND, GATE, SUM, SCATTER = range(11)
ROUTE, EXPERTS, DENSE_EXPERTS, WIDEN, COPY, SCALE_BY_POSITION, MIX, MATCH_RMS, SPARSIFY_GATE = range(11, 20)
CONVOLVE, DELTA_RULE, STEP_SIZES, GATED_NORM, STATE_SPACE, HEAD_PRODUCT = range(20, 26)
MEAN_STREAMS, ADD_TO_STREAMS, GATE_STREAMS, NGRAMS, POOL_KEYS, CHOOSE_BLOCKS = range(26, 32)
"""Numbers of `OperationKind`."""

SCORES = {"softmax": 0, "sigmoid": 1, "softmax_of_chosen": 2, "sigmoid_of_chosen": 3, "sparse_mixer": 4}
"""Numbers of `Scores`."""

MAX_MATRICES, MAX_GROUPS, MAX_STREAMS, MAX_KERNEL, MAX_NGRAM = 3, 64, 4, 16, 8

_TYPES = {"*": ctypes.c_void_p, "%": ctypes.c_double}


def _fields(names: str) -> tuple[tuple[str, type], ...]:
    """Returns the fields of a structure: `*` marks an address, `%` a float64, all others are int64."""
    return tuple((name.lstrip("*%"), _TYPES.get(name[0], ctypes.c_int64)) for name in names.split())


class LookupCall(ctypes.Structure):
    _fields_ = _fields("num_rows *ids *matrix *out num_threads")


class PickCall(ctypes.Structure):
    _fields_ = _fields("num_rows row_bytes *rows *numbers *out num_threads")


class NormCall(ctypes.Structure):
    _fields_ = _fields("dtype kind num_rows width *rows *weight *out %epsilon num_threads")


class ProductCall(ctypes.Structure):
    _fields_ = (
        *_fields("num_rows num_matrices *rows"),
        ("matrices", ctypes.c_void_p * MAX_MATRICES),
        ("outs", ctypes.c_void_p * MAX_MATRICES),
        *_fields("num_threads"),
    )


class HeadProductCall(ctypes.Structure):
    _fields_ = _fields(
        "num_rows num_heads *rows head_stride row_stride *matrices *out out_head_stride out_row_stride num_threads"
    )


class DenseProductCall(ctypes.Structure):
    _fields_ = _fields(
        "dtype is_transposed num_heads num_rows inner outer *rows head_stride row_stride *matrices matrix_stride"
        " line_stride *bias *out out_head_stride out_row_stride num_threads"
    )


class AnglesCall(ctypes.Structure):
    _fields_ = _fields(
        "dtype num_rows half axis_stride *positions *frequencies *axes %factor *cosines *sines num_threads"
    )


class PagedRowsCall(ctypes.Structure):
    """`Rows` of the interface."""

    _fields_ = _fields("*pages offset head_stride token_stride in_q8")


class RunCall(ctypes.Structure):
    _fields_ = (
        *_fields("start num_rows page_tokens"),
        ("keys", PagedRowsCall),
        ("values", PagedRowsCall),
        *_fields("*spans num_spans"),
    )


class NormRotateStoreCall(ctypes.Structure):
    _fields_ = (
        *_fields(
            "dtype num_rows num_heads dim row_stride *rows *norm norm_kind norm_stride %epsilon rotary_first half"
        ),
        *_fields("pairing *cosines *sines table"),
        ("to", PagedRowsCall),
        *_fields("num_threads"),
    )


class AttentionCall(ctypes.Structure):
    _fields_ = _fields(
        "dtype num_heads num_kv_heads key_dim value_dim num_runs window chunk *query query_head_stride query_row_stride"
        " *out *sinks %scale %softcap num_threads block num_chosen *chosen"
    )


class AttendCall(ctypes.Structure):
    _anonymous_ = ("attention",)
    _fields_ = (
        ("attention", AttentionCall),
        *_fields("table value_table sees_pictures"),
        ("keys", PagedRowsCall),
        ("values", PagedRowsCall),
    )


class GateCall(ctypes.Structure):
    _fields_ = _fields(
        "dtype num_rows width each gate_stride up_stride function %factor *gate *up *curve *out num_threads"
    )


class SumCall(ctypes.Structure):
    _fields_ = _fields("dtype num_rows width %factor *first *second *out num_threads")


class ScatterCall(ctypes.Structure):
    _fields_ = _fields("dtype num_rows width adds count *numbers *from_ *rows num_threads")


class RouterCall(ctypes.Structure):
    _fields_ = _fields(
        "dtype num_rows num_experts num_chosen scores groups groups_chosen of_group is_normed *logits *bias *scales"
        " %floor %factor %softcap %threshold *chosen *weights num_threads"
    )


class ExpertsCall(ctypes.Structure):
    _fields_ = _fields(
        "num_rows num_chosen num_experts weighs_rows *rows *chosen *weights *gate *up *down *curve *up_curve *out"
        " num_threads"
    )


class DenseExpertsCall(ctypes.Structure):
    _fields_ = _fields(
        "dtype num_rows num_chosen num_experts width inner outer is_transposed step up_shift weighs_rows function"
        " up_function %slope %limit *rows *chosen *weights *first *last *first_bias *last_bias *curve *up_curve *out"
        " num_threads"
    )


class WideningCall(ctypes.Structure):
    _fields_ = _fields("num_rows width narrows *rows *out num_threads")


class PositionScalingCall(ctypes.Structure):
    _fields_ = _fields("dtype num_rows width offset period %factor *positions *rows num_threads")


class CopyCall(ctypes.Structure):
    _fields_ = _fields(
        "num_rows num_heads num_bytes *source row_bytes head_bytes *out out_row_bytes out_head_bytes num_threads"
    )


class MixCall(ctypes.Structure):
    _fields_ = (
        *_fields("dtype num_rows width count"),
        ("rows", ctypes.c_void_p * MAX_STREAMS),
        *_fields("*factors factors_stride %offset *base *out num_threads"),
    )


class RmsMatchingCall(ctypes.Structure):
    _fields_ = _fields("dtype num_rows width *like *rows num_threads")


class GateSparsityCall(ctypes.Structure):
    _fields_ = _fields("dtype num_rows width %deviations *rows num_threads")


class StatePlace(ctypes.Structure):
    _fields_ = _fields("group offset num_bytes")


class ConvolutionCall(ctypes.Structure):
    _fields_ = _fields(
        "dtype num_runs num_rows channels kernel has_silu row_stride *rows *weight *bias *out num_threads"
    )


class PlannedConvolutionCall(ctypes.Structure):
    _anonymous_ = ("call",)
    _fields_ = (("call", ConvolutionCall), ("place", StatePlace), *_fields("kept"))


class DeltaRuleCall(ctypes.Structure):
    _fields_ = _fields(
        "dtype num_runs heads key_heads key_dim value_dim decay_dim *query *key *value query_stride key_stride"
        " value_stride *decay *beta *out %epsilon num_threads"
    )


class PlannedDeltaRuleCall(ctypes.Structure):
    _anonymous_ = ("call",)
    _fields_ = (("call", DeltaRuleCall), ("place", StatePlace), *_fields("kept_decay kept_beta"))


class StateSpaceCall(ctypes.Structure):
    _fields_ = _fields(
        "dtype num_runs heads groups dim state_dim *rows *into *from_ row_stride into_stride from_stride *steps *decay"
        " *skip *out num_threads"
    )


class PlannedStateSpaceCall(ctypes.Structure):
    _anonymous_ = ("call",)
    _fields_ = (("call", StateSpaceCall), ("place", StatePlace), *_fields("kept"))


class StepSizesCall(ctypes.Structure):
    _fields_ = _fields("dtype num_rows width row_stride %least %most *rows *bias *factors *out num_threads")


class GatedNormCall(ctypes.Structure):
    _fields_ = _fields(
        "dtype num_rows width group gates_first function gate_stride num_weights %epsilon *rows *gate *weight *out"
        " num_threads"
    )


class StreamMeanCall(ctypes.Structure):
    _fields_ = _fields("dtype num_rows width count *gates *streams *curve *out num_threads")


class StreamSumCall(ctypes.Structure):
    _fields_ = _fields("dtype num_rows width count *gates *rows *streams num_threads")


class StreamGateCall(ctypes.Structure):
    _fields_ = _fields("dtype num_rows width count *keys *queries *rows *out num_threads")


class TablePartCall(ctypes.Structure):
    """`TablePart` of the interface."""

    _fields_ = _fields("first file offset *content")


class NGramsCall(ctypes.Structure):
    _fields_ = _fields(
        "dtype stored num_runs num_rows size heads width end num_parts *ids *multipliers *sizes *offsets *parts *out"
        " num_threads"
    )


class PlannedNGramsCall(ctypes.Structure):
    _anonymous_ = ("call",)
    _fields_ = (("call", NGramsCall), ("place", StatePlace), *_fields("kept"))


class PoolKeysCall(ctypes.Structure):
    _fields_ = (
        *_fields("dtype num_rows dim block half norm_kind *norm %epsilon %factor *frequencies table"),
        ("keys", PagedRowsCall),
        *_fields("num_threads"),
    )


class ChooseBlocksCall(ctypes.Structure):
    _fields_ = (
        *_fields("dtype num_rows num_heads dim block num_chosen *query table"),
        ("keys", PagedRowsCall),
        *_fields("*chosen num_threads"),
    )


CALLS: Mapping[int, type[ctypes.Structure]] = {
    LOOK_UP: LookupCall,
    PICK: PickCall,
    NORM: NormCall,
    PRODUCT: ProductCall,
    DENSE: DenseProductCall,
    ANGLES: AnglesCall,
    NORM_ROTATE_STORE: NormRotateStoreCall,
    ATTEND: AttendCall,
    GATE: GateCall,
    SUM: SumCall,
    SCATTER: ScatterCall,
    ROUTE: RouterCall,
    EXPERTS: ExpertsCall,
    DENSE_EXPERTS: DenseExpertsCall,
    WIDEN: WideningCall,
    COPY: CopyCall,
    SCALE_BY_POSITION: PositionScalingCall,
    MIX: MixCall,
    MATCH_RMS: RmsMatchingCall,
    SPARSIFY_GATE: GateSparsityCall,
    CONVOLVE: PlannedConvolutionCall,
    DELTA_RULE: PlannedDeltaRuleCall,
    STEP_SIZES: StepSizesCall,
    GATED_NORM: GatedNormCall,
    STATE_SPACE: PlannedStateSpaceCall,
    HEAD_PRODUCT: HeadProductCall,
    MEAN_STREAMS: StreamMeanCall,
    ADD_TO_STREAMS: StreamSumCall,
    GATE_STREAMS: StreamGateCall,
    NGRAMS: PlannedNGramsCall,
    POOL_KEYS: PoolKeysCall,
    CHOOSE_BLOCKS: ChooseBlocksCall,
}
"""The structure of each kind of operation. Its anonymous parts have their fields set as its own."""


class Operation(ctypes.Structure):
    _fields_ = _fields("kind is_of_logits *call")


class Operations(ctypes.Structure):
    """`Plan` of the interface."""

    _fields_ = _fields("num_operations *operations")


class PlanRun(ctypes.Structure):
    _fields_ = _fields("start num_rows num_logits *spans num_spans *tables *befores *states *kept kept_rows")


class PlanStep(ctypes.Structure):
    _fields_ = _fields("num_rows num_logits num_runs page_tokens is_replay *runs num_threads")
