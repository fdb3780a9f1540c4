"""Generation with a cache gives what generation without one gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograde.models import EncoderDecoder, KVCache, ReversibleLM
from retrograde.models._attention import SelfAttention
from retrograde.models._cache import Sampling
from retrograde.models._positions import rotary_angles, rotate


def sharpened(model: nn.Module) -> nn.Module:
    """The model with updates large enough for tokens to matter much to each other."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(20 if "update" in name else 4 if parameter.ndim == 2 else 1)
    return model


@pytest.fixture
def model() -> Any:
    return sharpened(ReversibleLM(vocabulary=30, width=32, depth=3, heads=4, kv_heads=2))


@torch.no_grad()
def without_cache(model: Any, tokens: Tensor, steps: int, sampling: Sampling) -> Tensor:
    for _ in range(steps):
        tokens = torch.cat([tokens, sampling.choose(model(tokens)[:, -1])], 1)
    return tokens


SAMPLINGS = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}]


@pytest.mark.parametrize("options", SAMPLINGS, ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_cached_generation_equals_uncached_generation_token_for_token(options: dict[str, Any], kv_heads: int) -> None:
    model = sharpened(ReversibleLM(vocabulary=30, width=32, depth=3, heads=4, kv_heads=kv_heads))
    prompt = torch.randint(30, (3, 5))
    steps = 80  # more than a cache holds at first
    generated = model.generate(prompt, steps, generator=torch.Generator().manual_seed(1), **options)
    sampling = Sampling(**options, generator=torch.Generator().manual_seed(1))
    assert generated.shape == (3, 85)
    assert torch.equal(generated, without_cache(model, prompt, steps, sampling))
    assert len(generated[:, 5:].unique()) > 8


@pytest.mark.parametrize("parts", [(1,) * 12, (5, 1, 1, 4, 1), (12,), (3, 9)], ids=str)
def test_logits_with_a_cache_are_those_of_the_whole_text(model: Any, parts: tuple[int, ...]) -> None:
    tokens = torch.randint(30, (2, 12))
    cache = KVCache()
    with torch.no_grad():
        logits = torch.cat([model(part, cache=cache) for part in tokens.split(parts, 1)], 1)
        expected = model(tokens)
    assert cache.length == 12
    assert (logits - expected).abs().max() < 1e-5 < expected.std()


def test_the_cache_of_a_model_in_evaluation_works_in_inference_mode(model: Any) -> None:
    tokens = torch.randint(30, (1, 6))
    with torch.inference_mode():
        cache = KVCache()
        model(tokens[:, :5], cache=cache)
        torch.testing.assert_close(model(tokens[:, 5:], cache=cache)[:, 0], model(tokens)[:, -1])


def test_a_cache_in_training_is_refused(model: Any) -> None:
    with pytest.raises(
        RuntimeError, match=r"A cache \(0 tokens seen\) was given while gradients are recorded.*no_grad"
    ):
        model(torch.randint(30, (1, 4)), cache=KVCache())


def test_an_encoder_decoder_generates_with_a_cache_what_it_does_without() -> None:
    model = sharpened(EncoderDecoder(20, 30, width=32, depth=3, heads=4, kv_heads=2))
    source, start = torch.randint(20, (2, 7)), torch.zeros(2, 1, dtype=torch.int64)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    generated = model.generate(source, start, 20, mask, temperature=0)
    tokens = start
    with torch.no_grad():
        for _ in range(20):
            tokens = torch.cat([tokens, model(source, tokens, mask)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(generated, tokens)
    assert not torch.equal(generated, model.generate(source.flip(1), start, 20, mask, temperature=0))


def test_generation_draws_from_its_generator_only_and_repeats_with_its_seed(model: Any) -> None:
    prompt = torch.randint(30, (2, 3))
    before = torch.get_rng_state()
    first, repeated, other = (
        model.generate(prompt, 20, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, repeated)
    assert not torch.equal(first, other)


def test_only_the_likeliest_tokens_are_chosen_with_top_k() -> None:
    logits = torch.randn(1, 30).expand(2000, 30)
    chosen = Sampling(temperature=5.0, top_k=4).choose(logits)
    assert set(chosen.flatten().tolist()) == set(logits[0].topk(4).indices.tolist())


def test_temperature_sets_the_odds() -> None:
    logits = torch.tensor([0.0, 1.0]).expand(40_000, 2)
    share = Sampling(temperature=2.0).choose(logits).float().mean()
    assert abs(share - torch.sigmoid(torch.tensor(0.5))) < 0.01


def test_generation_leaves_training_flags_and_grad_mode_unchanged() -> None:
    model = ReversibleLM(vocabulary=30, width=32, depth=2, heads=4, dropout=0.5)
    model.stack.blocks[0].eval()
    flags = [module.training for module in model.modules()]
    prompt = torch.randint(30, (1, 3))
    generated = model.generate(prompt, 10, temperature=0)
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(generated, model.generate(prompt, 10, temperature=0))  # without dropout
    assert not generated.requires_grad
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), {}, r"shape \(3,\) and dtype torch.int64; give whole numbers of shape"),
        (torch.zeros(2, 0, dtype=torch.int64), {}, r"shape \(2, 0\).*length of 1 or more"),
        (torch.zeros(2, 3), {}, "dtype torch.float32; give whole numbers"),
        (torch.zeros(2, 3, dtype=torch.int64), {"temperature": -1.0}, "temperature=-1.0: give 0"),
        (torch.zeros(2, 3, dtype=torch.int64), {"top_k": 0}, "top_k=0: give 1 or more"),
    ],
)
def test_a_bad_prompt_or_option_is_refused(model: Any, prompt: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.generate(prompt, 2, **options)


# What generation relies on


def test_a_token_attends_only_to_those_before_it(model: Any) -> None:
    tokens = torch.randint(30, (1, 10))
    other = tokens.clone()
    other[0, 6] = (other[0, 6] + 1) % 30
    with torch.no_grad():
        change = (model(tokens) - model(other)).abs().amax(-1)[0]
    assert (change[:6] == 0).all()
    assert (change[6:] > 1e-4).all()


def test_the_product_of_rotated_queries_and_keys_depends_on_their_distance_only() -> None:
    query, key = torch.randn(2, 1, 16, dtype=torch.float64)

    def product(at: int, to: int) -> Tensor:
        positions = [rotary_angles(torch.tensor([place]), 16) for place in (at, to)]
        return (rotate(query, positions[0]) * rotate(key, positions[1])).sum()

    torch.testing.assert_close(product(3, 1), product(103, 101), rtol=1e-4, atol=1e-4)  # angles are in float32
    assert (product(3, 1) - product(3, 2)).abs() > 1e-2


def test_grouped_heads_are_heads_that_share_keys_and_values() -> None:
    few, many = SelfAttention(16, heads=4, kv_heads=2, sees="past"), SelfAttention(16, heads=4, sees="past")
    state = few.state_dict()
    grouped = state["read_keys_values.weight"].view(2, 2, 4, 16)
    state["read_keys_values.weight"] = grouped.repeat_interleave(2, 1).reshape(32, 16)
    many.load_state_dict(state)
    x = torch.randn(2, 6, 16)
    torch.testing.assert_close(few(x), many(x))


def test_an_odd_head_width_is_refused_where_positions_turn_pairs() -> None:
    with pytest.raises(ValueError, match="a head has 5: make it even"):
        ReversibleLM(10, width=15, depth=1, heads=3)(torch.zeros(1, 2, dtype=torch.int64))
