"""Mixtures of experts: their files, and that a token's experts do not see its neighbours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_kit.core import core_request, generate, make_core, run, tokens
from gguf import GGMLQuantizationType as Kind
from model_kit.checkpoints import merged
from model_kit.gguf import MODULES, save_lora
from model_kit.mixture import answer_of, published_mixture, save_mixture_gguf

from diptych_engine.execution.kv_cache_size import peak_of_a_step
from diptych_engine.models.layer import Expert, ExpertStacks
from diptych_engine.models.linear import Linear
from diptych_engine.models.mixture import mixture, route, stacked_mixture, stacks_pay
from diptych_frontend.model_files.model_source import resolve_model
from diptych_kernels.packed_product import is_available as has_packed_product
from diptych_protocol import InvalidRequestError, LoRARequest

PROMPT = [(7 * place) % 64 for place in range(40)]
DUMMY = (
    "dummy://?architecture=qwen3_moe&num_experts=4&num_experts_per_tok=2&moe_intermediate_size=32"
)


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


@pytest.mark.parametrize("mlp_only_layers", [[], [1]])
def test_experts_that_are_saved_stacked(
    tmp_path: Path, lone_sequence: Callable[..., Any], mlp_only_layers: list[int]
) -> None:
    model = published_mixture(tmp_path, stacked=True, mlp_only_layers=mlp_only_layers)
    actual = lone_sequence(resolve_model(str(tmp_path)), 48).logits(PROMPT)
    torch.testing.assert_close(actual, logits_of(model), atol=1e-3, rtol=1e-3)


def test_experts_of_a_gguf_file(tmp_path: Path, lone_sequence: Callable[..., Any]) -> None:
    model = published_mixture(tmp_path / "hf")
    source = resolve_model(save_mixture_gguf(tmp_path / "model.gguf", model))
    actual = lone_sequence(source, 48).logits(PROMPT)
    torch.testing.assert_close(actual, logits_of(model), atol=1e-3, rtol=1e-3)


@pytest.mark.skipif(not has_packed_product(), reason="nothing is packed at this level")
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1])
def test_experts_stay_packed(tmp_path: Path, lone_sequence: Callable[..., Any], kind: Kind) -> None:
    """Every matrix but the router; and they compute what the file's values do.

    A token for which two experts are nearly equal may get the other one, since a matrix unit
    multiplies in bfloat16. So it is the median of all tokens that counts.
    """
    model = published_mixture(tmp_path / "hf")
    source = resolve_model(save_mixture_gguf(tmp_path / "model.gguf", model, kind))
    packed, plain = lone_sequence(source, 48, packs=True), lone_sequence(source, 48)
    assert all(packable.linear.packed for packable in packed.model.packables)
    assert len(packed.model.packables) == 2 + 3 * (2 + 6 * 2)
    sizes = [30, *[1] * 10]
    actual, expected = (x.logits_in_chunks(PROMPT, sizes) for x in (packed, plain))
    of_each_token = (actual.log_softmax(-1) - expected.log_softmax(-1)).abs().mean(-1)
    assert of_each_token.median() < 0.1 * expected.std()


def test_a_missing_expert_is_named(tmp_path: Path, lone_sequence: Callable[..., Any]) -> None:
    published_mixture(tmp_path, stacked=True)
    config = tmp_path / "config.json"
    config.write_text(
        config.read_text().replace('"num_local_experts": 6', '"num_local_experts": 7')
    )
    with pytest.raises(InvalidRequestError, match=r"tensor model.layers.0.mlp.experts.6\.\w+"):
        lone_sequence(resolve_model(str(tmp_path)), 48)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("num_experts_per_tok=5", "num_experts_per_tok is 5, not 1 to 4"),
        ("num_experts=5000", "num_experts is 5000, not 1 to 4096"),
        ("moe_intermediate_size=0", "moe_intermediate_size is 0"),
        ("decoder_sparse_step=0", "decoder_sparse_step is 0"),
        ("architecture=qwen3", "num_experts in qwen3"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(change: str, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        resolve_model(f"{DUMMY}&{change}")


def random_experts(number: int) -> list[Expert]:
    return [Expert(Linear(torch.randn(16, 24)), Linear(torch.randn(12, 16))) for _ in range(number)]


def test_a_mixture_is_the_sum_of_what_its_experts_make() -> None:
    torch.manual_seed(1)
    experts, x = random_experts(5), torch.randn(9, 16)
    chosen, weights = route(x, torch.randn(16, 5), 3, renormalise=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(9))
    expected = torch.zeros(9, 16)
    for token in range(9):
        for expert, weight in zip(chosen[token], weights[token], strict=True):
            gate, up = (x[token] @ experts[expert].gate_up.weight).chunk(2)
            part = torch.nn.functional.silu(gate) * up
            expected[token] += weight * (part @ experts[expert].down.weight)
    actual = mixture(x, chosen, weights, experts, num_decodes=4)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_experts_in_one_memory_make_the_same() -> None:
    """Also where some of them have no token."""
    torch.manual_seed(3)
    stacks = ExpertStacks(torch.randn(7, 16, 24), torch.randn(7, 12, 16))
    views = zip(stacks.gate_up, stacks.down, strict=True)
    experts = [Expert(Linear(gate_up), Linear(down)) for gate_up, down in views]
    for num_tokens in (1, 9):
        x = torch.randn(num_tokens, 16)
        chosen, weights = route(x, torch.randn(16, 7), 2, renormalise=True)
        torch.testing.assert_close(
            stacked_mixture(x, chosen, weights, stacks),
            mixture(x, chosen, weights, experts, num_decodes=0),
        )


@pytest.mark.parametrize(("hidden", "inner"), [(16, 16), (16, 12), (20, 16)])
def test_experts_are_in_one_memory_where_there_is_a_product_for_their_sizes(
    hidden: int, inner: int
) -> None:
    """torch's refuses others, also on a CPU."""
    source = resolve_model("dummy://?num_hidden_layers=1")
    sizes = {"hidden_size": hidden, "moe_intermediate_size": inner}
    config = msgspec.structs.replace(source.config, **sizes)
    shapes = (2, hidden, 2 * inner), (2, inner, hidden)
    stacks = ExpertStacks(*(torch.ones(shape, dtype=torch.bfloat16) for shape in shapes))
    x, chosen = torch.ones(1, hidden, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64)
    has_product = True
    try:
        stacked_mixture(x, chosen, torch.ones(1, 1, dtype=torch.bfloat16), stacks)
    except RuntimeError:
        has_product = False
    assert stacks_pay(config, torch.device("meta"), torch.bfloat16) == has_product


def test_the_neighbours_of_a_token_change_no_bit() -> None:
    """Its experts' parts are added in the order of its own choice, whoever stands beside it.

    The products are of small integers, or by ones, so that they round nothing."""
    torch.manual_seed(2)
    experts = [
        Expert(Linear(torch.randint(-3, 4, (16, 32)).float()), Linear(torch.eye(16)))
        for _ in range(5)
    ]
    x = torch.randint(-3, 4, (12, 16)).float()
    chosen, weights = route(x, torch.randn(16, 5), 3, renormalise=False)

    def sums_of(rows: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
        own = chosen[rows][:, top], weights[rows][:, top]
        return mixture(x[rows], *own, experts, num_decodes=len(rows) // 2)

    own_order, other_order = torch.tensor([0, 1, 2]), torch.tensor([2, 0, 1])
    expected = sums_of(torch.arange(12), own_order)
    for rows in (torch.randperm(12), torch.arange(5, 9), torch.tensor([7])):
        assert torch.equal(sums_of(rows, own_order), expected[rows])
    assert not torch.equal(sums_of(torch.arange(12), other_order), expected), "the order matters"


def test_requests_get_the_same_tokens_alone_and_together(tmp_path: Path) -> None:
    """Greedy, as transformers generates them; in chunks, and with others in the same steps."""
    model = published_mixture(tmp_path)
    prompts = [PROMPT[start:] for start in range(0, 30, 6)]
    expected = [answer_of(model, prompt, 12) for prompt in prompts]
    core = make_core(str(tmp_path), block_size=4, max_num_batched_tokens=16)
    requests = [
        core_request(str(index), prompt, max_tokens=12, ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]
    assert [tokens(run(core, each)[each.request_id]) for each in requests] == expected
    core = make_core(str(tmp_path), block_size=4, max_num_batched_tokens=16)
    together = run(core, *requests)
    assert [tokens(together[each.request_id]) for each in requests] == expected
    core.close()


def test_an_adapter_changes_attention_and_no_expert(tmp_path: Path) -> None:
    model = published_mixture(tmp_path / "base")
    attention = [module for module in MODULES if "self_attn" in module]
    own = save_lora(tmp_path / "attention", modules=attention)
    core = make_core(str(tmp_path / "base"), max_model_len=128)
    request = core_request("r", PROMPT, max_tokens=8, lora_request=LoRARequest("one", 1, own))
    [actual] = run(core, request).values()
    experts = LoRARequest("two", 2, save_lora(tmp_path / "experts"))
    [refused] = run(core, core_request("x", PROMPT, max_tokens=8, lora_request=experts)).values()
    assert ".weight has no place in this model" in (refused[-1].error or "")
    core.close()
    model.load_state_dict(merged(model.state_dict(), own))
    model.save_pretrained(tmp_path / "merged")
    core = make_core(str(tmp_path / "merged"), max_model_len=128)
    assert tokens(actual) == generate(core, PROMPT, max_tokens=8)
    core.close()


def test_the_room_for_a_step_counts_the_experts_rows() -> None:
    few = resolve_model(f"{DUMMY}&intermediate_size=32").config
    many = resolve_model(f"{DUMMY}&intermediate_size=32&num_experts_per_tok=4").config
    assert peak_of_a_step(many, 512, 8, 2) > peak_of_a_step(few, 512, 8, 2)
