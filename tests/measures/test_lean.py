"""The cosine gap at its ends, and between them."""

import torch

from kvtransfer.measures.lean import cosine_gap


def test_the_ends_are_one_minus_the_references_cosine_and_its_negative() -> None:
    random = torch.Generator().manual_seed(0)
    target, source = torch.randn(2, 3, 4, 16, 8, generator=random)
    apart = 1 - torch.cosine_similarity(target, source, dim=-1).mean((1, 2))

    torch.testing.assert_close(cosine_gap(target, target, source), apart)
    torch.testing.assert_close(cosine_gap(source, target, source), -apart)
    assert bool((apart > 0.5).all())


def test_a_stranger_leans_to_neither() -> None:
    random = torch.Generator().manual_seed(0)
    stranger, target, source = torch.randn(3, 2, 500, 64, generator=random)

    assert float(cosine_gap(stranger, target, source).abs().max()) < 0.03


def test_one_rotation_of_all_three_changes_nothing() -> None:
    random = torch.Generator().manual_seed(0)
    vectors, target, source = torch.randn(3, 2, 50, 8, generator=random)
    turn = torch.linalg.qr(torch.randn(8, 8, generator=random)).Q

    torch.testing.assert_close(
        cosine_gap(vectors @ turn, target @ turn, source @ turn),
        cosine_gap(vectors, target, source),
    )
