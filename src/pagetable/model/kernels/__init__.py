"""The CPU's kernels: compiled when first used, kept on disk, the same to the bit in any batch.

    vectors     registers as values
    tiles       a tile of a product, and a square turned over, register by register
    team        threads that run one compiled function together
    linear      packed weights and their product
    plan        how a step's attention is cut into units of work
    attention   attention through the block table, in place
    backend     the same for a model whose other parts are PyTorch's
    decoder     the whole of a step, from token ids to logits
    sampling    drawing tokens, without and with filters
    compile     where machine code is kept

Importing this needs Numba; the rest of `pagetable.model` does without.
"""
