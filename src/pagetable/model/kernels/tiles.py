"""The two kernels that live in registers: a tile of a matrix product, and a square turned over.

Both are emitted for LLVM number by number rather than written as loops, because their point is which numbers stay in
which registers, and no optimiser can be trusted with that.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagetable.model.kernels.vectors import (
    INT32,
    INT64,
    INTS,
    LANES,
    TILE_COLUMNS,
    TILE_ROWS,
    VECTOR,
    address_of,
    call_llvm,
    load_vector,
    splat_number,
    store_vector,
)

STORE, ADD, CHAIN = 0, 1, 2  # what `multiply_tile` does with its sums: see there


@intrinsic
def multiply_tile(
    typing, rows, a, a_at, a_row, b, b_at, b_row, depth,
    c, c_at, c_row, how, soon_at, soon_step,
):  # fmt: skip
    """c[:rows, :TILE_COLUMNS] = a[:rows, :depth] @ b[:depth, :TILE_COLUMNS]; with ADD or CHAIN, +=.

    1 <= rows <= TILE_ROWS. Each matrix is a flat array, an offset (`a_at`) and the distance of two rows (`a_row`); a
    and c are float32, b is that or uint16 that holds bfloat16. All sums stay in registers. A sum is one chain of fused
    multiply-adds over the depth from 0 up: its bits depend on its row and its column and on nothing else. ADD forms it
    apart and adds it to what was there; CHAIN goes on from what was there, as if two depths were one.

    On the way, b is prefetched from offset `soon_at`, which may lie past its end, going on by `soon_step` numbers at
    each step of the depth: evenly, since a processor drops requests that come faster than its memory answers.
    """

    def generate(context, builder, signature, args):
        rows, a, a_at, a_row, b, b_at, b_row, depth, c, c_at, c_row, how, soon_at, soon_step = args
        a = address_of(context, builder, signature.args[1], a, a_at)
        soon = address_of(context, builder, signature.args[4], b, soon_at)
        b = address_of(context, builder, signature.args[4], b, b_at)
        c = address_of(context, builder, signature.args[8], c, c_at)
        end = builder.append_basic_block("end")
        switch = builder.switch(rows, end)
        for count in range(1, TILE_ROWS + 1):
            block = builder.append_basic_block(f"rows{count}")
            switch.add_case(ir.Constant(INT64, count), block)
            builder.position_at_end(block)
            weights = b, b_row, signature.args[4].dtype, soon, soon_step
            sums = _tile_sums(builder, count, (a, a_row), weights, depth, (c, c_row), how)
            _put_sums(builder, sums, (c, c_row), how)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    offset = types.intp
    matrix = (offset, offset)
    return types.void(offset, a, *matrix, b, *matrix, offset, c, *matrix, offset, offset, offset), generate


def _tile_sums(builder, rows, a, b, depth, c, how):
    """Emit the loop over the depth for a fixed number of rows; sums[row][half] are phi nodes, that is, registers.

    Rows of a are addressed in fours from one pointer each: a processor has too few registers for a pointer a row.
    """
    (a, a_row), (b, b_row, element, soon, soon_step) = a, b
    number = lambda n: ir.Constant(INT64, n)  # noqa: E731
    a_row_3 = builder.mul(a_row, number(3))
    in_four = [number(0), a_row, builder.mul(a_row, number(2)), a_row_3]
    firsts = [builder.gep(a, [builder.mul(a_row, number(row))]) for row in range(0, rows, 4)]
    starts = _starting_sums(builder, rows, c, how)
    before = builder.block
    loop, after = builder.append_basic_block("depth"), builder.append_basic_block("sums")
    builder.cbranch(builder.icmp_signed(">", depth, number(0)), loop, after)
    builder.position_at_end(loop)
    # Pointers, each with what it moves by at every step of the depth.
    moving = [(first, number(1)) for first in firsts] + [(b, b_row), (soon, soon_step)]
    left = builder.phi(INT64)
    pointers = [builder.phi(pointer.type) for pointer, _ in moving]
    sums = [[builder.phi(VECTOR) for _ in range(2)] for _ in range(rows)]
    halves = [load_vector(builder, element, builder.gep(pointers[-2], [number(half * LANES)])) for half in range(2)]
    _prefetch_row(builder, pointers[-1], element)
    added = []
    for row in range(rows):
        x = splat_number(builder, builder.load(builder.gep(pointers[row // 4], [in_four[row % 4]])))
        added.append([call_llvm(builder, "fma", x, halves[half], sums[row][half]) for half in range(2)])
    fewer = builder.sub(left, number(1))
    left.add_incoming(depth, before)
    left.add_incoming(fewer, loop)
    for phi, (pointer, step) in zip(pointers, moving, strict=True):
        phi.add_incoming(pointer, before)
        phi.add_incoming(builder.gep(phi, [step]), loop)
    builder.cbranch(builder.icmp_signed(">", fewer, number(0)), loop, after)
    builder.position_at_end(after)
    results = [[builder.phi(VECTOR) for _ in range(2)] for _ in range(rows)]
    for row in range(rows):
        for half in range(2):
            for phi in (sums, results):
                phi[row][half].add_incoming(starts[row][half], before)
                phi[row][half].add_incoming(added[row][half], loop)
    return results


def _starting_sums(builder, rows, c, how):
    """Zeros, or with CHAIN what stands in c."""
    fresh = builder.block
    chain, begin = builder.append_basic_block("chain"), builder.append_basic_block("begin")
    builder.cbranch(builder.icmp_signed("==", how, ir.Constant(INT64, CHAIN)), chain, begin)
    builder.position_at_end(chain)
    there = [[load_vector(builder, types.float32, place) for place in places] for places in _places(builder, rows, c)]
    builder.branch(begin)
    builder.position_at_end(begin)
    starts = [[builder.phi(VECTOR) for _ in range(2)] for _ in range(rows)]
    for row in range(rows):
        for half in range(2):
            starts[row][half].add_incoming(ir.Constant(VECTOR, [0.0] * LANES), fresh)
            starts[row][half].add_incoming(there[row][half], chain)
    return starts


def _places(builder, rows, c):
    """Addresses of the two halves of each row of a tile of c."""
    c, c_row = c
    starts = [builder.gep(c, [builder.mul(c_row, ir.Constant(INT64, row))]) for row in range(rows)]
    return [[builder.gep(start, [ir.Constant(INT64, half * LANES)]) for half in range(2)] for start in starts]


def _prefetch_line(builder, address):
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, keep, data = 0, 3, 1
    flags = [ir.Constant(INT32, flag) for flag in (read, keep, data)]
    builder.call(function, [builder.bitcast(address, byte), *flags])


def _prefetch_row(builder, address, element):
    """Ask for the cache lines of one row of b."""
    numbers_a_line = 16 if element == types.float32 else 32
    for start in range(0, TILE_COLUMNS, numbers_a_line):
        _prefetch_line(builder, builder.gep(address, [ir.Constant(INT64, start)]))


def _put_sums(builder, sums, c, how):
    add, put, done = (builder.append_basic_block(name) for name in ("add", "put", "done"))
    places = _places(builder, len(sums), c)
    pairs = [pair for row in zip(sums, places, strict=True) for pair in zip(*row, strict=True)]
    builder.cbranch(builder.icmp_signed("==", how, ir.Constant(INT64, ADD)), add, put)
    builder.position_at_end(add)
    for value, place in pairs:
        there = load_vector(builder, types.float32, place)
        store_vector(builder, types.float32, builder.fadd(there, value), place)
    builder.branch(done)
    builder.position_at_end(put)
    for value, place in pairs:
        store_vector(builder, types.float32, value, place)
    builder.branch(done)
    builder.position_at_end(done)


@intrinsic
def transpose_square(typing, a, a_at, a_row, c, c_at, c_row):
    """c[j, i] = a[i, j] for i, j < LANES: log2(LANES) rounds of shuffles between pairs of registers."""

    def generate(context, builder, signature, args):
        a, a_at, a_row, c, c_at, c_row = args
        a = address_of(context, builder, signature.args[0], a, a_at)
        c = address_of(context, builder, signature.args[3], c, c_at)
        element, number = signature.args[0].dtype, lambda n: ir.Constant(INT64, n)
        rows = [
            load_vector(builder, element, builder.gep(a, [builder.mul(a_row, number(row))])) for row in range(LANES)
        ]
        for row, value in enumerate(_transposed(builder, rows)):
            store_vector(builder, types.float32, value, builder.gep(c, [builder.mul(c_row, number(row))]))
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
                swapped[row] = builder.shuffle_vector(*pair, ir.Constant(INTS, upper))
                swapped[row + width] = builder.shuffle_vector(*pair, ir.Constant(INTS, lower))
        rows = swapped
        width //= 2
    return rows
