"""Tests of engine/noise: as good as random, and the same for any micro-batches. Bounds: 5 standard errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from isobatch.core.errors import UserError
from isobatch.engine.model_setup.layer_blocks import checkpoint_activations
from isobatch.engine.noise.keyed_attention import key_dropout
from isobatch.engine.noise.keyed_noise import (
    KeyedDropout,
    KeyedNoise,
    _DropOnDevice,
    _dropped_formula,
    _hash_formula,
    apply_mask,
    hash_bits,
    keep_mask,
)

CPU = torch.device("cpu")


def noise(samples: Sequence[int], seed: int = 0, step: int = 0, sites: Sequence[str] = ()) -> KeyedNoise:
    made = KeyedNoise(seed)
    for site in sites:
        made.register(site)
    made.bind(step, np.array(samples), CPU)
    return made


def random_keys(rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(-(2**31), 2**31, (rows, 2), generator=generator).to(torch.int32)


@pytest.mark.parametrize(
    ("rows", "count"),
    [(1, 1), (3, 7), (5, 1 << 15), (3, (1 << 15) + 1), (40, 1000), (2, 70_000), (70_000, 1), (4, 0)],
)
def test_the_chunked_hash_is_the_formula(rows: int, count: int) -> None:
    keys = random_keys(rows)
    assert torch.equal(hash_bits(keys, count), _hash_formula(keys, count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 4, 6), (2, 3, 5, 7)])
def test_a_device_drops_in_one_kernel_what_a_mask_would(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, keys = torch.randn(shape, dtype=dtype), random_keys(shape[0])
    for p in (0.05, 0.5, 1e-6):
        masked = apply_mask(x, keep_mask(keys, x[0].numel(), p), p)
        assert torch.equal(_dropped_formula(x, keys, p), masked)


def test_a_device_drops_the_gradient_as_it_did_the_input() -> None:
    x, keys = torch.randn(3, 8, requires_grad=True), random_keys(3)
    dropped = _DropOnDevice.apply(x, keys, 0.3)
    (gradient,) = torch.autograd.grad(dropped.sum(), x)
    assert torch.equal(gradient * x, dropped)
    assert 0 < int((gradient == 0).sum()) < 24


def test_the_numbers_are_frozen() -> None:
    """A change of the formula changes every run: `verify` would find all older ones different."""
    keys = torch.tensor([[0, 0], [1, -2]], dtype=torch.int32)
    assert hash_bits(keys, 3).tolist() == [[0, 1492470133, 911671261], [-1887344078, -941092132, -998513790]]
    assert noise([0, 7], seed=1, step=2).bits("site", 2).tolist() == [
        [-823463141, -599114401],
        [-1281855627, 9313153],
    ]
    assert noise([5], seed=3, step=4).integers("x", (6,), 100).tolist() == [[34, 69, 98, 21, 45, 89]]
    kept = keep_mask(noise([5], sites=["d"]).sites["d"].draw(), 12, 0.5)
    assert kept[0].int().tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1]


ROWS, COUNT = 400, 1000
MANY = range(ROWS)
Vary = Callable[[int], Tensor]


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_the_kept_share_is_what_was_asked(p: float) -> None:
    keys = noise(MANY, sites=["d"]).sites["d"].draw()
    kept = keep_mask(keys, COUNT, p).double()
    share = 1 - round(p * 65536) / 65536
    error = (share * (1 - share)) ** 0.5
    assert abs(kept.mean() - share) < 5 * error / (ROWS * COUNT) ** 0.5
    # ... of every sample and at every position, not only over all.
    assert (kept.mean(1) - share).abs().max() < 5.5 * error / COUNT**0.5
    assert (kept.mean(0) - share).abs().max() < 5.5 * error / ROWS**0.5


def chi_square(cells: Tensor, count: int) -> float:
    """In standard deviations from what chance gives."""
    expected = len(cells) / count
    statistic = ((torch.bincount(cells, minlength=count) - expected) ** 2 / expected).sum()
    return float((statistic - (count - 1)) / (2 * (count - 1)) ** 0.5)


VARIED: dict[str, Vary] = {
    "sample": lambda i: noise([i]).uniform("u", (20_000,))[0],
    "far sample": lambda i: noise([i * 10**6]).uniform("u", (20_000,))[0],
    "step": lambda i: noise([3], step=i).uniform("u", (20_000,))[0],
    "seed": lambda i: noise([3], seed=i).uniform("u", (20_000,))[0],
    "site": lambda i: noise([3]).uniform(f"layer.{i}", (20_000,))[0],
    "salt": lambda i: noise([3]).uniform("u", (20_000,), salt=i)[0],
    "position": lambda i: noise([3]).uniform("u", (20_100,))[0][i : i + 20_000],
}


@pytest.mark.parametrize("varied", VARIED)
def test_draws_are_independent(varied: str) -> None:
    rows = torch.stack([VARIED[varied](i) for i in range(12)]).double()
    correlation = torch.corrcoef(rows) - torch.eye(12)
    assert correlation.abs().max() < 5 / 20_000**0.5
    # Two together fall into each of 16 x 16 cells alike: no pattern that a correlation would miss.
    coarse = (rows * 16).long()
    assert max(abs(chi_square(coarse[0] * 16 + other, 256)) for other in coarse[1:]) < 5


def test_normal_has_the_moments_of_a_normal() -> None:
    x = noise(MANY).normal("n", (COUNT,)).double().flatten()
    total = len(x)
    assert torch.isfinite(x).all()
    assert abs(x.mean()) < 5 / total**0.5
    assert abs(x.var() - 1) < 5 * (2 / total) ** 0.5
    z = (x - x.mean()) / x.std()
    assert abs((z**3).mean()) < 5 * (6 / total) ** 0.5
    assert abs((z**4).mean() - 3) < 5 * (24 / total) ** 0.5
    assert abs((x.abs() > 3).double().mean() - 0.0026998) < 5 * (0.0027 / total) ** 0.5


DRAWS: dict[str, Callable[[KeyedNoise], Tensor]] = {
    "bits": lambda n: n.bits("s", 9),
    "uniform": lambda n: n.uniform("s", (3, 5)),
    "normal": lambda n: n.normal("s", (4,)),
    "integers": lambda n: n.integers("s", (2, 3), 11),
}


@given(
    st.lists(st.integers(0, 2**40), min_size=1, max_size=30, unique=True),
    st.randoms(use_true_random=False),
    st.sampled_from(sorted(DRAWS)),
)
def test_a_sample_draws_the_same_in_any_company(samples: list[int], random, kind: str) -> None:  # type: ignore[no-untyped-def]
    whole = DRAWS[kind](noise(samples, seed=5, step=9))
    some = random.sample(range(len(samples)), random.randint(1, len(samples)))
    assert torch.equal(DRAWS[kind](noise([samples[i] for i in some], seed=5, step=9)), whole[some])


def dropped(x: Tensor, samples: Sequence[int], p: float = 0.3, step: int = 0) -> Tensor:
    made = KeyedNoise(0)
    layer = KeyedDropout(p, made, "layer").train()
    made.bind(step, np.array(samples), CPU)
    return layer(x)


@given(st.integers(1, 12), st.integers(0, 9), st.integers(1, 7), st.integers(1, 5))
def test_padding_on_the_right_moves_no_mask(length: int, padding: int, width: int, rows: int) -> None:
    samples = list(range(10, 10 + rows))
    short, long = torch.ones(rows, length, width), torch.ones(rows, length + padding, width)
    assert torch.equal(dropped(long, samples)[:, :length], dropped(short, samples))


def test_the_gradient_passes_where_the_value_did() -> None:
    x = torch.randn(4, 50, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = dropped(x, [1, 2, 3, 4])
    y.sum().backward()
    assert x.grad is not None
    scale = 65536 / (65536 - round(0.3 * 65536))
    assert x.grad.unique().tolist() == [0.0, pytest.approx(scale)]
    assert torch.equal(x.grad * x, y)  # one mask, one scale


def test_an_input_without_a_row_per_sample_is_refused() -> None:
    with pytest.raises(UserError, match=r"dropout layer sees a tensor of shape \(6, 4\).* of 3 samples"):
        dropped(torch.ones(6, 4), [1, 2, 3])


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Sequential(nn.GELU(), nn.Dropout(0.2)))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_every_dropout_of_a_model_is_replaced_and_has_its_own_site() -> None:
    model, made = Blocks(), KeyedNoise(0)
    assert key_dropout(model, made) == 5
    assert not [m for m in model.modules() if type(m) is nn.Dropout]
    assert list(made.sites) == ["drop", "blocks.0.1", "blocks.0.2.1", "blocks.1.1", "blocks.1.2.1"]
    assert [m.p for m in model.modules() if isinstance(m, KeyedDropout)] == [0.1, 0.3, 0.2, 0.3, 0.2]


def test_recomputed_activations_see_the_same_mask() -> None:
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model, made = Blocks(), KeyedNoise(0)
        key_dropout(model, made)
        if recompute:
            assert checkpoint_activations(model, "on", keyed=True) == 2
        made.bind(3, np.arange(5), CPU)
        model(torch.ones(5, 4, 8)).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.equal(*gradients)


class Twice(nn.Module):
    """One dropout module, called twice in a forward."""

    def __init__(self, noise: KeyedNoise) -> None:
        super().__init__()
        self.drop = KeyedDropout(0.5, noise, "drop")

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.drop(x), self.drop(x)])


def test_a_module_called_twice_draws_twice_and_the_same_next_time() -> None:
    made = KeyedNoise(0)
    model = Twice(made).train()
    made.bind(3, np.arange(4), torch.device("cpu"))
    first, second = model(torch.ones(4, 500))
    # Independent halves: both kept in a quarter of the places, five standard errors around it.
    assert float(((first > 0) & (second > 0)).float().mean()) == pytest.approx(
        0.25, abs=5 * (0.1875 / 2000) ** 0.5
    )
    made.bind(3, np.arange(4), torch.device("cpu"))
    assert torch.equal(model(torch.ones(4, 500)), torch.stack([first, second]))


def test_compiling_changes_no_draw() -> None:
    made = KeyedNoise(0)
    model = Twice(made).train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.ones(4, 50)
    for step in range(3):
        made.bind(step, np.arange(4), CPU)
        plain = model(x)
        made.bind(step, np.arange(4), CPU)
        with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
            assert torch.equal(compiled(x), plain)


def test_recomputing_a_module_called_twice_is_refused() -> None:
    from torch.utils.checkpoint import checkpoint

    made = KeyedNoise(0)
    model = Twice(made).train()
    made.bind(0, np.arange(4), torch.device("cpu"))
    out = checkpoint(
        model, torch.ones(4, 5, requires_grad=True), use_reentrant=False, preserve_rng_state=False
    )
    with pytest.raises(UserError, match="called several times"):
        out.sum().backward()


def test_compiled_dropout_passes_the_same_gradient() -> None:
    """torch 2.11 gives none where a Function computes in place; 2.13, which the lock has, does."""
    keys = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)

    def loss(x: Tensor) -> Tensor:
        y = x.sin()
        return apply_mask(y, keep_mask(keys, y[0].numel(), 0.3), 0.3).square().sum()

    torch.compiler.reset()
    gradients = []
    for function in (loss, torch.compile(loss, backend="eager")):
        x = torch.linspace(-1, 1, 24).view(2, 12).requires_grad_()
        function(x).backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert gradients[0].any()
    assert torch.equal(*gradients)
