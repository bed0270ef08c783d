"""The processor's vector registers as values in compiled Python, written out.

Numba turns `a + b` on two numbers into one machine instruction. Here it learns a type of LANES float32 numbers, so that
`load(x, i) * y` is one instruction on a whole register, written out rather than hoped for from an optimiser. LLVM
knows such vectors on every processor; only how many lanes are worth asking for differs.

Each result is the same to the bit for whatever batch it is computed in: a sum runs over a fixed order of additions, by
position, never by what else stands in the batch.
"""

from __future__ import annotations

import operator

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from pagetable.model.kernels.compile import FEATURES, compiled

# Lanes of a register, and rows of a tile: rows x 2 registers of sums, 2 of weights and 1 of input must fit into the
# register file (32 with AVX-512 and NEON, 16 with AVX2).
if FEATURES.get("avx512f"):
    LANES, TILE_ROWS = 16, 12
elif FEATURES.get("avx2"):
    LANES, TILE_ROWS = 8, 6
elif FEATURES.get("sse2"):
    LANES, TILE_ROWS = 4, 6
else:
    LANES, TILE_ROWS = 4, 12
TILE_COLUMNS = 2 * LANES

FLOAT, INT32, INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(INT32, LANES)


class VectorType(types.Type):  # type: ignore[misc]
    """LANES numbers of float32 in one register."""

    def __init__(self):
        super().__init__(name=f"float32x{LANES}")


vector = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager, frontend_type):
        super().__init__(manager, frontend_type, VECTOR)


# ------------------------------------------------------------------------------------------------ loading and storing


def address_of(context, builder, array_type, array, offset):
    """LLVM's pointer to array[offset]."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [offset])


def load_vector(builder, element, address):
    """LANES numbers from `address`, unaligned; bfloat16, which is the upper half of a float32, is widened."""
    if element == types.float32:
        return builder.load(builder.bitcast(address, VECTOR.as_pointer()), align=4)
    halves = builder.load(builder.bitcast(address, ir.VectorType(ir.IntType(16), LANES).as_pointer()), align=2)
    shift = ir.Constant(INTS, [16] * LANES)
    return builder.bitcast(builder.shl(builder.zext(halves, INTS), shift), VECTOR)


def store_vector(builder, element, value, address):
    """LANES numbers to `address`, unaligned; rounded to nearest even where it holds bfloat16."""
    if element == types.float32:
        builder.store(value, builder.bitcast(address, VECTOR.as_pointer()), align=4)
        return
    word = lambda n: ir.Constant(INTS, [n] * LANES)  # noqa: E731
    bits = builder.bitcast(value, INTS)
    upper = builder.lshr(bits, word(16))
    odd = builder.and_(upper, word(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, word(0x7FFF))), word(16))
    quiet = builder.or_(upper, word(0x40))  # rounding could carry a NaN over into infinity
    chosen = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    halves = ir.VectorType(ir.IntType(16), LANES)
    builder.store(builder.trunc(chosen, halves), builder.bitcast(address, halves.as_pointer()), align=2)


@intrinsic
def load(typing, array, offset):
    """array[offset : offset + LANES], of float32, or of uint16 that holds bfloat16."""

    def generate(context, builder, signature, args):
        address = address_of(context, builder, signature.args[0], *args)
        return load_vector(builder, signature.args[0].dtype, address)

    return vector(array, types.intp), generate


@intrinsic
def store(typing, array, offset, value):
    """array[offset : offset + LANES] = value, of float32, or of uint16 that holds bfloat16."""

    def generate(context, builder, signature, args):
        array, offset, value = args
        address = address_of(context, builder, signature.args[0], array, offset)
        store_vector(builder, signature.args[0].dtype, value, address)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), generate


def splat_number(builder, number):
    """All lanes the same number, inside an intrinsic."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(INT32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES))


@intrinsic
def splat(typing, number):
    """All lanes the same number."""

    def generate(context, builder, signature, args):
        return splat_number(builder, args[0])

    return vector(types.float32), generate


@intrinsic
def widen(typing, number):
    """A float32, or a uint16 that holds a bfloat16, as float32."""

    def generate(context, builder, signature, args):
        if signature.args[0] == types.float32:
            return args[0]
        bits = builder.shl(builder.zext(args[0], INT32), ir.Constant(INT32, 16))
        return builder.bitcast(bits, FLOAT)

    return types.float32(number), generate


@compiled
def put(array, offset, number):
    """array[offset] = number; as bfloat16 where the array is uint16."""
    if array.itemsize == 4:
        array[offset] = number
    else:
        array[offset] = _narrow(number)


@intrinsic
def _narrow(typing, number):
    """The bfloat16 nearest to a float32, as uint16."""

    def generate(context, builder, signature, args):
        place = cgutils.alloca_once(builder, ir.VectorType(ir.IntType(16), LANES))
        element = builder.gep(builder.bitcast(place, ir.IntType(16).as_pointer()), [ir.Constant(INT32, 0)])
        store_vector(builder, types.uint16, splat_number(builder, args[0]), element)
        return builder.load(element)

    return types.uint16(types.float32), generate


# --------------------------------------------------------------------------------------------------------- arithmetic


def _binary(name: str):
    @intrinsic
    def operation(typing, left, right):
        def generate(context, builder, signature, args):
            return getattr(builder, name)(*args)

        return vector(vector, vector), generate

    return operation


_add, _subtract, _multiply, _divide = (_binary(name) for name in ("fadd", "fsub", "fmul", "fdiv"))


def _both(left, right) -> bool:
    return isinstance(left, VectorType) and isinstance(right, VectorType)


@overload(operator.add)
def _overload_add(left, right):
    return (lambda left, right: _add(left, right)) if _both(left, right) else None


@overload(operator.sub)
def _overload_sub(left, right):
    return (lambda left, right: _subtract(left, right)) if _both(left, right) else None


@overload(operator.mul)
def _overload_mul(left, right):
    return (lambda left, right: _multiply(left, right)) if _both(left, right) else None


@overload(operator.truediv)
def _overload_div(left, right):
    return (lambda left, right: _divide(left, right)) if _both(left, right) else None


def call_llvm(builder, name: str, *args):
    """Call one of LLVM's own functions on vectors, such as fma."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * len(args))
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32")
    return builder.call(function, args)


@intrinsic
def fma(typing, x, y, z):
    """x * y + z, rounded once."""

    def generate(context, builder, signature, args):
        return call_llvm(builder, "fma", *args)

    return vector(vector, vector, vector), generate


@intrinsic
def larger(typing, left, right):
    """Lane by lane the larger; NaN if the left one is."""

    def generate(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered("<", *args), args[1], args[0])

    return vector(vector, vector), generate


@intrinsic
def first_lanes(typing, count, value, other):
    """The first `count` lanes of `value`, the others of `other`: a choice, not a product, so that NaN stays out."""

    def generate(context, builder, signature, args):
        lane = ir.Constant(ir.VectorType(INT64, LANES), list(range(LANES)))
        many = builder.insert_element(ir.Constant(lane.type, ir.Undefined), args[0], ir.Constant(INT32, 0))
        many = builder.shuffle_vector(many, ir.Constant(lane.type, ir.Undefined), ir.Constant(INTS, [0] * LANES))
        return builder.select(builder.icmp_signed("<", lane, many), args[1], args[2])

    return vector(types.intp, vector, vector), generate


def _folded(builder, value, combine):
    """Fold the upper half onto the lower until one lane is left: always the same order."""
    width = LANES
    while width > 1:
        width //= 2
        lanes = [(lane + width) % LANES for lane in range(LANES)]
        value = combine(value, builder.shuffle_vector(value, value, ir.Constant(INTS, lanes)))
    return builder.extract_element(value, ir.Constant(INT32, 0))


@intrinsic
def sum_of(typing, value):
    """The sum of all lanes, in pairs."""

    def generate(context, builder, signature, args):
        return _folded(builder, args[0], builder.fadd)

    return types.float32(vector), generate


@intrinsic
def largest_of(typing, value):
    """The largest lane."""

    def generate(context, builder, signature, args):
        return _folded(builder, args[0], lambda a, b: builder.select(builder.fcmp_ordered("<", a, b), b, a))

    return types.float32(vector), generate


@intrinsic
def _exponent(typing, x):
    """floor(x * log2(e) + 1/2) for each lane; 0 for NaN."""

    def generate(context, builder, signature, args):
        scaled = builder.fmul(args[0], ir.Constant(VECTOR, [1.44269504088896341] * LANES))
        nearest = call_llvm(builder, "floor", builder.fadd(scaled, ir.Constant(VECTOR, [0.5] * LANES)))
        number = builder.fcmp_ordered("==", nearest, nearest)
        return builder.select(number, nearest, ir.Constant(VECTOR, [0.0] * LANES))

    return vector(vector), generate


@intrinsic
def _two_to(typing, n):
    """2 ** n for whole n from -126 to 127, made of the exponent's bits."""

    def generate(context, builder, signature, args):
        biased = builder.add(builder.fptosi(args[0], INTS), ir.Constant(INTS, [127] * LANES))
        return builder.bitcast(builder.shl(biased, ir.Constant(INTS, [23] * LANES)), VECTOR)

    return vector(vector), generate


@intrinsic
def _within(typing, x, least, most):
    """x, not below least nor above most; NaN stays NaN."""

    def generate(context, builder, signature, args):
        x, least, most = args
        x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
        return builder.select(builder.fcmp_ordered(">", x, most), most, x)

    return vector(vector, vector, vector), generate


@intrinsic
def _zero_below(typing, x, least, value):
    """value where x >= least or NaN, 0 where it is less."""

    def generate(context, builder, signature, args):
        x, least, value = args
        return builder.select(builder.fcmp_ordered("<", x, least), ir.Constant(VECTOR, [0.0] * LANES), value)

    return vector(vector, vector, vector), generate


_EXP_LEAST, _EXP_MOST = np.float32(-87.0), np.float32(88.0)
_LN2_HIGH, _LN2_LOW = np.float32(-0.693359375), np.float32(2.12194440e-4)
_EXP_TERMS = tuple(
    np.float32(term)
    for term in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
_ONE = np.float32(1.0)


@compiled
def exp(x):
    """e ** x to about two units in the last place, 0 below -87, e ** 88 above 88 (Cephes, expf)."""
    inside = _within(x, splat(_EXP_LEAST), splat(_EXP_MOST))
    n = _exponent(inside)
    r = fma(n, splat(_LN2_LOW), fma(n, splat(_LN2_HIGH), inside))
    terms = splat(_EXP_TERMS[0])
    terms = fma(terms, r, splat(_EXP_TERMS[1]))
    terms = fma(terms, r, splat(_EXP_TERMS[2]))
    terms = fma(terms, r, splat(_EXP_TERMS[3]))
    terms = fma(terms, r, splat(_EXP_TERMS[4]))
    terms = fma(terms, r, splat(_EXP_TERMS[5]))
    value = (fma(terms, r * r, r) + splat(_ONE)) * _two_to(n)
    return _zero_below(x, splat(_EXP_LEAST), value)
