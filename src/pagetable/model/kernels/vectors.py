"""The processor's vector registers as values in compiled Python, and the two kernels that live in them.

Numba turns `a + b` on two numbers into one machine instruction. Here it learns a type of LANES float32 numbers, so that
`load(x, i) * y` is one instruction on a whole register, written out rather than hoped for from an optimiser. LLVM
knows such vectors on every processor; only how many lanes are worth asking for differs.

Each result is the same to the bit for whatever batch it is computed in: a sum runs over a fixed order of additions, by
position, never by what else stands in the batch.
"""

from __future__ import annotations

import operator

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from pagetable.model.kernels.compile import compiled

_FEATURES = binding.get_host_cpu_features()
# Lanes of a register, and rows of a tile: rows x 2 registers of sums, 2 of weights and 1 of input must fit into the
# register file (32 with AVX-512 and NEON, 16 with AVX2).
LANES, TILE_ROWS = (16, 12) if _FEATURES.get("avx512f") else (8, 6) if _FEATURES.get("avx2") else (4, 12)
TILE_COLUMNS = 2 * LANES
_PREFETCH_STEPS = 16  # how many rows of weights ahead; of 8 to 64 measured alike, none is a tenth slower

_FLOAT, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INTS = ir.VectorType(_INT32, LANES)


class VectorType(types.Type):
    """LANES numbers of float32 in one register."""

    def __init__(self):
        super().__init__(name=f"float32x{LANES}")


vector = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager, frontend_type):
        super().__init__(manager, frontend_type, _VECTOR)


# ------------------------------------------------------------------------------------------------ loading and storing


def _address(context, builder, array_type, array, offset):
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [offset])


def _load_vector(builder, element, address):
    """LANES numbers from `address`, unaligned; bfloat16, which is the upper half of a float32, is widened."""
    if element == types.float32:
        return builder.load(builder.bitcast(address, _VECTOR.as_pointer()), align=4)
    halves = builder.load(builder.bitcast(address, ir.VectorType(ir.IntType(16), LANES).as_pointer()), align=2)
    shift = ir.Constant(_INTS, [16] * LANES)
    return builder.bitcast(builder.shl(builder.zext(halves, _INTS), shift), _VECTOR)


def _store_vector(builder, value, address):
    builder.store(value, builder.bitcast(address, _VECTOR.as_pointer()), align=4)


@intrinsic
def load(typing, array, offset):
    """array[offset : offset + LANES], of float32, or of uint16 that holds bfloat16."""

    def generate(context, builder, signature, args):
        address = _address(context, builder, signature.args[0], *args)
        return _load_vector(builder, signature.args[0].dtype, address)

    return vector(array, types.intp), generate


@intrinsic
def store(typing, array, offset, value):
    """array[offset : offset + LANES] = value, of float32."""

    def generate(context, builder, signature, args):
        _store_vector(builder, args[2], _address(context, builder, signature.args[0], args[0], args[1]))
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), generate


def _splat(builder, number):
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))


@intrinsic
def splat(typing, number):
    """All lanes the same number."""

    def generate(context, builder, signature, args):
        return _splat(builder, args[0])

    return vector(types.float32), generate


@intrinsic
def prefetch(typing, array, offset):
    """Ask for the cache line of array[offset], which need not exist."""

    def generate(context, builder, signature, args):
        _prefetch_line(builder, _address(context, builder, signature.args[0], *args))
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _prefetch_line(builder, address):
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _INT32, _INT32, _INT32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, keep, data = 0, 3, 1
    flags = [ir.Constant(_INT32, flag) for flag in (read, keep, data)]
    builder.call(function, [builder.bitcast(address, byte), *flags])


@intrinsic
def widen(typing, number):
    """A float32, or a uint16 that holds a bfloat16, as float32."""

    def generate(context, builder, signature, args):
        if signature.args[0] == types.float32:
            return args[0]
        bits = builder.shl(builder.zext(args[0], _INT32), ir.Constant(_INT32, 16))
        return builder.bitcast(bits, _FLOAT)

    return types.float32(number), generate


@intrinsic
def put(typing, array, offset, number):
    """array[offset] = number; as bfloat16, rounded to nearest even, where the array is uint16."""

    def generate(context, builder, signature, args):
        array, offset, number = args
        address = _address(context, builder, signature.args[0], array, offset)
        if signature.args[0].dtype == types.uint16:
            number = _to_bfloat16(builder, number)
        builder.store(number, address)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), generate


def _to_bfloat16(builder, number):
    bits, word = builder.bitcast(number, _INT32), lambda n: ir.Constant(_INT32, n)
    odd = builder.and_(builder.lshr(bits, word(16)), word(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, word(0x7FFF))), word(16))
    nan = builder.or_(builder.lshr(bits, word(16)), word(0x40))  # rounding could carry a NaN over into infinity
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", number, number), nan, rounded), ir.IntType(16))


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


def _llvm(builder, name: str, *args):
    """Call one of LLVM's own functions on vectors, such as fma."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * len(args))
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32")
    return builder.call(function, args)


@intrinsic
def fma(typing, x, y, z):
    """x * y + z, rounded once."""

    def generate(context, builder, signature, args):
        return _llvm(builder, "fma", *args)

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
        lane = ir.Constant(ir.VectorType(_INT64, LANES), list(range(LANES)))
        many = builder.insert_element(ir.Constant(lane.type, ir.Undefined), args[0], ir.Constant(_INT32, 0))
        many = builder.shuffle_vector(many, ir.Constant(lane.type, ir.Undefined), ir.Constant(_INTS, [0] * LANES))
        return builder.select(builder.icmp_signed("<", lane, many), args[1], args[2])

    return vector(types.intp, vector, vector), generate


def _folded(builder, value, combine):
    """Fold the upper half onto the lower until one lane is left: always the same order."""
    width = LANES
    while width > 1:
        width //= 2
        lanes = [(lane + width) % LANES for lane in range(LANES)]
        value = combine(value, builder.shuffle_vector(value, value, ir.Constant(_INTS, lanes)))
    return builder.extract_element(value, ir.Constant(_INT32, 0))


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
        return _folded(
            builder, args[0], lambda a, b: builder.select(builder.fcmp_ordered("<", a, b), b, a)
        )

    return types.float32(vector), generate


@intrinsic
def _exponent(typing, x):
    """floor(x * log2(e) + 1/2) for each lane; 0 for NaN."""

    def generate(context, builder, signature, args):
        scaled = builder.fmul(args[0], ir.Constant(_VECTOR, [1.44269504088896341] * LANES))
        nearest = _llvm(builder, "floor", builder.fadd(scaled, ir.Constant(_VECTOR, [0.5] * LANES)))
        number = builder.fcmp_ordered("==", nearest, nearest)
        return builder.select(number, nearest, ir.Constant(_VECTOR, [0.0] * LANES))

    return vector(vector), generate


@intrinsic
def _two_to(typing, n):
    """2 ** n for whole n from -126 to 127, made of the exponent's bits."""

    def generate(context, builder, signature, args):
        biased = builder.add(builder.fptosi(args[0], _INTS), ir.Constant(_INTS, [127] * LANES))
        return builder.bitcast(builder.shl(biased, ir.Constant(_INTS, [23] * LANES)), _VECTOR)

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
        return builder.select(builder.fcmp_ordered("<", x, least), ir.Constant(_VECTOR, [0.0] * LANES), value)

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


# ------------------------------------------------------------------------------------------------- the product's tile

STORE, ADD = 0, 1  # what `multiply_tile` does with its sums


@intrinsic
def multiply_tile(
    typing, rows, a, a_at, a_row, b, b_at, b_row, depth,
    c, c_at, c_row, how,
):  # fmt: skip
    """c[:rows, :TILE_COLUMNS] = (or, with ADD, +=) a[:rows, :depth] @ b[:depth, :TILE_COLUMNS].

    1 <= rows <= TILE_ROWS. Each matrix is a flat array, an offset (`a_at`) and the distance of two rows (`a_row`); a and c are
    float32, b is that or uint16 that holds bfloat16. All sums stay in registers. A sum is one chain of fused
    multiply-adds over the depth from 0 up: its bits depend on its row and its column and on nothing else.
    """

    def generate(context, builder, signature, args):
        rows, a, a_at, a_row, b, b_at, b_row, depth, c, c_at, c_row, how = args
        a = _address(context, builder, signature.args[1], a, a_at)
        b = _address(context, builder, signature.args[4], b, b_at)
        c = _address(context, builder, signature.args[8], c, c_at)
        end = builder.append_basic_block("end")
        switch = builder.switch(rows, end)
        for count in range(1, TILE_ROWS + 1):
            block = builder.append_basic_block(f"rows{count}")
            switch.add_case(ir.Constant(_INT64, count), block)
            builder.position_at_end(block)
            sums = _tile_sums(builder, count, (a, a_row), (b, b_row, signature.args[4].dtype), depth)
            _put_sums(builder, sums, (c, c_row), how)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    offset = types.intp
    matrix = (offset, offset)
    return types.void(offset, a, *matrix, b, *matrix, offset, c, *matrix, offset), generate


def _tile_sums(builder, rows, a, b, depth):
    """Emit the loop over the depth for a fixed number of rows; sums[row][half] are phi nodes, that is, registers."""
    (a, a_row), (b, b_row, element) = a, b
    zero, number = ir.Constant(_VECTOR, [0.0] * LANES), lambda n: ir.Constant(_INT64, n)
    a_rows = [builder.gep(a, [builder.mul(a_row, number(row))]) for row in range(rows)]
    before = builder.block
    loop, after = builder.append_basic_block("depth"), builder.append_basic_block("sums")
    builder.cbranch(builder.icmp_signed(">", depth, number(0)), loop, after)
    builder.position_at_end(loop)
    k = builder.phi(_INT64)
    k.add_incoming(number(0), before)
    sums = [[builder.phi(_VECTOR) for _ in range(2)] for _ in range(rows)]
    at = builder.gep(b, [builder.mul(k, b_row)])
    halves = [_load_vector(builder, element, builder.gep(at, [number(half * LANES)])) for half in range(2)]
    _prefetch_row(builder, builder.gep(at, [builder.mul(b_row, number(_PREFETCH_STEPS))]), element)
    added = []
    for row in range(rows):
        x = _splat(builder, builder.load(builder.gep(a_rows[row], [k])))
        added.append([_llvm(builder, "fma", x, halves[half], sums[row][half]) for half in range(2)])
    following = builder.add(k, number(1))
    k.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)
    builder.position_at_end(after)
    results = [[builder.phi(_VECTOR) for _ in range(2)] for _ in range(rows)]
    for row in range(rows):
        for half in range(2):
            sums[row][half].add_incoming(zero, before)
            sums[row][half].add_incoming(added[row][half], loop)
            results[row][half].add_incoming(zero, before)
            results[row][half].add_incoming(added[row][half], loop)
    return results


def _prefetch_row(builder, address, element):
    """Ask for a row of b that comes later: a panel of weights is read once, in order, from memory."""
    numbers_a_line = 16 if element == types.float32 else 32
    for start in range(0, TILE_COLUMNS, numbers_a_line):
        _prefetch_line(builder, builder.gep(address, [ir.Constant(_INT64, start)]))


def _put_sums(builder, sums, c, how):
    c, c_row = c
    add, put, done = (builder.append_basic_block(name) for name in ("add", "put", "done"))
    places = [
        (value, builder.gep(c, [builder.add(builder.mul(c_row, ir.Constant(_INT64, row)), ir.Constant(_INT64, half * LANES))]))
        for row, halves in enumerate(sums)
        for half, value in enumerate(halves)
    ]  # fmt: skip
    builder.cbranch(builder.icmp_signed("==", how, ir.Constant(_INT64, ADD)), add, put)
    builder.position_at_end(add)
    for value, place in places:
        _store_vector(builder, builder.fadd(_load_vector(builder, types.float32, place), value), place)
    builder.branch(done)
    builder.position_at_end(put)
    for value, place in places:
        _store_vector(builder, value, place)
    builder.branch(done)
    builder.position_at_end(done)


@intrinsic
def transpose_square(typing, a, a_at, a_row, c, c_at, c_row):
    """c[j, i] = a[i, j] for i, j < LANES: log2(LANES) rounds of shuffles between pairs of registers."""

    def generate(context, builder, signature, args):
        a, a_at, a_row, c, c_at, c_row = args
        a = _address(context, builder, signature.args[0], a, a_at)
        c = _address(context, builder, signature.args[3], c, c_at)
        element, number = signature.args[0].dtype, lambda n: ir.Constant(_INT64, n)
        rows = [
            _load_vector(builder, element, builder.gep(a, [builder.mul(a_row, number(row))])) for row in range(LANES)
        ]
        for row, value in enumerate(_transposed(builder, rows)):
            _store_vector(builder, value, builder.gep(c, [builder.mul(c_row, number(row))]))
        return context.get_dummy_value()

    offset = types.intp
    return types.void(a, offset, offset, c, offset, offset), generate


def _transposed(builder, rows):
    """Swap the off-diagonal quarters of ever smaller squares."""
    width = LANES // 2
    while width:
        upper = [lane if not lane & width else LANES + lane - width for lane in range(LANES)]
        lower = [lane + width if not lane & width else LANES + lane for lane in range(LANES)]
        swapped = list(rows)
        for row in range(LANES):
            if not row & width:
                pair = rows[row], rows[row + width]
                swapped[row] = builder.shuffle_vector(*pair, ir.Constant(_INTS, upper))
                swapped[row + width] = builder.shuffle_vector(*pair, ir.Constant(_INTS, lower))
        rows = swapped
        width //= 2
    return rows
