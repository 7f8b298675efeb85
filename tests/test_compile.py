"""torch.compile of every op over a vocabulary: one graph for any number of tokens, eager's values and gradients."""

from compile_cases import LENGTHS, compare, compiled, crest_loss, every_op, graphs


@every_op
def test_one_graph_for_twenty_lengths(op):
    """And for as many values of the coefficients, which are annealed in training."""
    function = compiled(op)
    for step, length in enumerate(LENGTHS):
        compare(op, function, length, kl_coef=0.1 + 0.01 * step, entropy_coef=0.5 - 0.02 * step)
    assert len(LENGTHS) == 20 and graphs() == 1


def test_one_graph_around_the_kernels():
    function = compiled(crest_loss)
    for length in (3, 2, 8):
        compare(crest_loss, function, length, backend="triton")
    assert graphs() == 1
