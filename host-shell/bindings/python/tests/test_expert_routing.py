"""Routers and activations of experts beside the modules of transformers, with small random weights on the CPU."""

import pytest

import nvme_gpu
from nvme_gpu import compute

np = pytest.importorskip("numpy")

WIDTH, HIDDEN, TOKENS = 32, 16, 400


def refused(what, *match):
    with pytest.raises(nvme_gpu.Usage) as caught:
        what()
    for text in match:
        assert text in str(caught.value)


def module_of(model, name):
    pytest.importorskip("torch")
    found = pytest.importorskip(f"transformers.models.{model}.modeling_{model}", reason="transformers is not installed")
    return getattr(found, name)


def config_of(model, name, **settings):
    found = pytest.importorskip(f"transformers.models.{model}.configuration_{model}", reason="transformers is not installed")
    return getattr(found, name)(hidden_size=WIDTH, **settings)


def filled(module, seed=0, spread=0.5):
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.dtype.is_floating_point:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * spread)
    return module.eval()


def tokens_of(seed=1):
    torch = pytest.importorskip("torch")
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


def same_choices(found, indices, weights):
    """Whether both chose the same experts, whatever the order of theirs, with the same weights but for roundings."""
    indices, weights = indices.numpy(), weights.detach().float().numpy()
    ours, theirs = np.argsort(found.experts, -1), np.argsort(indices, -1)
    assert np.array_equal(np.take_along_axis(found.experts, ours, -1), np.take_along_axis(indices, theirs, -1))
    ours, theirs = np.take_along_axis(found.weights, ours, -1), np.take_along_axis(weights, theirs, -1)
    np.testing.assert_allclose(ours, theirs, rtol=2e-6)


def routed(router, x, *more):
    import torch

    with torch.no_grad():
        logits, weights, indices = router(x, *more)
    return logits.float().numpy(), weights, indices


@pytest.mark.by_hand
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (8, 4), (4, 1)])
@pytest.mark.parametrize("normalise", [True, False])
def test_sigmoid_with_groups_is_deepseek_v3(groups, kept, normalise):
    config = config_of(
        "deepseek_v3",
        "DeepseekV3Config",
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_group=groups,
        topk_group=kept,
        norm_topk_prob=normalise,
        routed_scaling_factor=2.5,
    )
    router = filled(module_of("deepseek_v3", "DeepseekV3TopkRouter")(config))
    bias = router.e_score_correction_bias.numpy()
    logits, weights, indices = routed(router, tokens_of())
    rule = {"groups": groups, "kept_groups": kept, "best_of_group": 2, "normalise": normalise, "epsilon": 1e-20}
    found = compute.moe_route(logits, 6, score="sigmoid", bias=bias, factor=2.5, **rule)
    same_choices(found, indices, weights)
    other = compute.moe_route(logits, 6, score="sigmoid", factor=2.5, **rule)
    assert not np.array_equal(np.sort(other.experts, -1), np.sort(found.experts, -1))


@pytest.mark.by_hand
def test_sigmoid_is_glm_4():
    config = config_of(
        "glm4_moe", "Glm4MoeConfig", n_routed_experts=32, num_experts_per_tok=8, n_group=1, topk_group=1,
        norm_topk_prob=True, routed_scaling_factor=2.5,
    )  # fmt: skip
    router = filled(module_of("glm4_moe", "Glm4MoeTopkRouter")(config))
    logits, weights, indices = routed(router, tokens_of())
    bias = router.e_score_correction_bias.numpy()
    found = compute.moe_route(logits, 8, score="sigmoid", bias=bias, normalise=True, epsilon=1e-20, factor=2.5)
    same_choices(found, indices, weights)


def deepseek_v4(**settings):
    settings = {"scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, **settings}
    return config_of(
        "deepseek_v4", "DeepseekV4Config", n_routed_experts=32, num_experts_per_tok=6, moe_intermediate_size=HIDDEN, **settings
    )


@pytest.mark.by_hand
def test_sqrt_softplus_is_deepseek_v4():
    router = filled(module_of("deepseek_v4", "DeepseekV4TopKRouter")(deepseek_v4()), spread=3.0)
    logits, weights, indices = routed(router, tokens_of())
    assert logits.max() > 20
    bias = router.e_score_correction_bias.numpy()
    rule = {"score": "sqrt_softplus", "normalise": True, "epsilon": 1e-20, "factor": 1.5}
    same_choices(compute.moe_route(logits, 6, bias=bias, **rule), indices, weights)


@pytest.mark.by_hand
def test_experts_of_a_table_are_deepseek_v4():
    torch = pytest.importorskip("torch")
    config = deepseek_v4(vocab_size=100)
    router = filled(module_of("deepseek_v4", "DeepseekV4HashRouter")(config))
    table = torch.stack([torch.randperm(32, generator=torch.Generator().manual_seed(seed))[:6] for seed in range(100)])
    router.tid2eid.copy_(table)
    ids = torch.arange(TOKENS) * 7 % 100
    logits, weights, indices = routed(router, tokens_of(), ids)
    chosen = table.numpy()[ids.numpy()].astype(np.int32)
    rule = {"score": "sqrt_softplus", "normalise": True, "epsilon": 1e-20, "factor": 1.5}
    found = compute.moe_route(logits, 6, chosen=chosen, **rule)
    assert np.array_equal(found.experts, chosen)
    same_choices(found, indices, weights)
    chosen[5, 2] = 32
    refused(lambda: compute.moe_route(logits, 6, chosen=chosen, **rule), "token 5 has the expert 32 of 32")
    chosen[5, 2] = -1
    refused(lambda: compute.moe_route(logits, 6, chosen=chosen, **rule), "token 5")


@pytest.mark.by_hand
def test_softmax_of_the_chosen_is_gpt_oss():
    config = config_of("gpt_oss", "GptOssConfig", num_local_experts=32, num_experts_per_tok=4)
    router = filled(module_of("gpt_oss", "GptOssTopKRouter")(config))
    logits, weights, indices = routed(router, tokens_of())
    same_choices(compute.moe_route(logits, 4, score="softmax_of_chosen"), indices, weights)
    same_choices(compute.moe_router(logits, 4), indices, weights)


@pytest.mark.by_hand
@pytest.mark.parametrize("normalise", [True, False])
def test_softmax_is_qwen3_and_mixtral(normalise):
    config = config_of("qwen3_moe", "Qwen3MoeConfig", num_experts=64, num_experts_per_tok=8, norm_topk_prob=normalise)
    router = filled(module_of("qwen3_moe", "Qwen3MoeTopKRouter")(config))
    logits, weights, indices = routed(router, tokens_of())
    same_choices(compute.moe_route(logits, 8, normalise=normalise), indices, weights)
    config = config_of("mixtral", "MixtralConfig", num_local_experts=8, num_experts_per_tok=2)
    router = filled(module_of("mixtral", "MixtralTopKRouter")(config))
    logits, weights, indices = routed(router, tokens_of())
    same_choices(compute.moe_route(logits, 2, normalise=True), indices, weights)


def test_ties_select_the_first_and_bad_rules_are_refused():
    logits = np.zeros((2, 8), np.float32)
    for score in ("softmax", "softmax_of_chosen", "sigmoid", "sqrt_softplus"):
        assert compute.moe_route(logits, 3, score=score).experts.tolist() == [[0, 1, 2]] * 2
    grouped = compute.moe_route(logits, 3, score="sigmoid", groups=4, kept_groups=2, best_of_group=2)
    assert grouped.experts.tolist() == [[0, 1, 2]] * 2
    refused(lambda: compute.moe_route(logits, 9), "9 experts cannot be chosen of 8")
    refused(lambda: compute.moe_route(logits, 3, groups=3), "groups")
    refused(lambda: compute.moe_route(logits, 3, groups=4, kept_groups=1), "1 of 4 groups")
    refused(lambda: compute.moe_route(logits, 3, score="relu"), "score is 'relu'")
    refused(lambda: compute.moe_route(logits, 3, bias=np.zeros(7, np.float32)), "the bias has 7 numbers")
    refused(lambda: compute.moe_route(logits, 3, chosen=np.zeros((2, 2), np.int32)), "chosen")
    refused(lambda: compute.moe_route(logits.astype(np.float64), 3), "logits")
    refused(lambda: compute.moe_activation(logits, logits, alpha=1.0), "without a limit")
    for limit in (float("nan"), -7, 0):
        refused(lambda: compute.moe_activation(logits, logits, limit=limit), f"limit is {float(limit)}")
    refused(lambda: compute.moe_activation(logits, logits, limit=7, alpha=float("inf")), "alpha is inf")
    refused(lambda: compute.moe_activation(logits, logits[:1]), "up")
    refused(lambda: compute.moe_activation(logits, logits, linear_beta=2), "without beta")
    refused(lambda: compute.moe_activation(logits, logits, beta=4, limit=2), "of two activations")
    refused(lambda: compute.moe_activation(logits, logits, beta=0), "beta is 0")


@pytest.mark.parametrize("beta,linear_beta", [(4.0, 25.0), (4.0, None), (0.25, 0.5)])
def test_situ_is_its_formula_in_float64(beta, linear_beta):
    gate, up = (np.random.default_rng(seed).standard_normal(4000).astype(np.float32) * 9 for seed in (1, 2))
    gate[:3], up[3:6] = (0, 1e-30, -1e-4), (np.inf, -np.inf, 1e-20)
    x, y = gate.astype(np.float64), up.astype(np.float64)
    of_up = y if linear_beta is None else linear_beta * np.tanh(y / linear_beta)
    wanted = beta * np.tanh(x / beta) / (1 + np.exp(-x)) * of_up
    found = compute.moe_activation(gate, up, beta=beta, linear_beta=linear_beta)
    np.testing.assert_allclose(found, wanted, rtol=3e-6, atol=1e-37)
    assert np.isnan(compute.moe_activation(np.float32([np.nan, 1]), np.float32([1, np.nan]), beta=4.0)).all()


def product(weight, x):
    return x.astype(np.float64) @ weight.astype(np.float64).T


def block(x, found, matrices, activation, biases=None):
    """Experts of each token, by routing and activation of this library; products in float64."""
    y = np.zeros_like(x, np.float64)
    for token in range(len(x)):
        for expert, weight in zip(found.experts[token], found.weights[token]):
            gate, up, down = (one[expert] for one in matrices)
            of_gate, of_up = product(gate, x[token]), product(up, x[token])
            if biases is not None:
                of_gate, of_up = of_gate + biases[0][expert], of_up + biases[1][expert]
            inner = compute.moe_activation(of_gate.astype(np.float32), of_up.astype(np.float32), **activation)
            of_down = product(down, inner)
            if biases is not None:
                of_down = of_down + biases[2][expert]
            y[token] += weight * of_down
    return y


@pytest.mark.by_hand
def test_a_block_of_deepseek_v4_with_its_shared_expert():
    torch = pytest.importorskip("torch")
    config = deepseek_v4(mlp_layer_types=["moe"], num_hidden_layers=1, swiglu_limit=1.0)
    made = filled(module_of("deepseek_v4", "DeepseekV4SparseMoeBlock")(config, 0))
    x = tokens_of()[:40]
    with torch.no_grad():
        wanted = made(x[None])[0].numpy()
        logits, _, _ = made.gate(x)
    rule = {"score": "sqrt_softplus", "normalise": True, "epsilon": 1e-20, "factor": 1.5}
    found = compute.moe_route(logits.numpy(), 6, bias=made.gate.e_score_correction_bias.numpy(), **rule)
    both = made.experts.gate_up_proj.detach().numpy()
    hidden = both.shape[1] // 2
    matrices = both[:, :hidden], both[:, hidden:], made.experts.down_proj.detach().numpy()
    routed_part = block(x.numpy(), found, matrices, {"limit": 1.0})
    shared = made.shared_experts
    gate, up, down = (one.weight.detach().numpy() for one in (shared.gate_proj, shared.up_proj, shared.down_proj))
    of_gate, of_up = (product(one, x.numpy()).astype(np.float32) for one in (gate, up))
    of_shared = product(down, compute.moe_activation(of_gate, of_up, limit=1.0))
    np.testing.assert_allclose(routed_part + of_shared, wanted, rtol=1e-4, atol=1e-4)
    assert np.abs(of_gate).max() > 1 and np.abs(of_up).max() > 1


@pytest.mark.by_hand
def test_a_block_of_gpt_oss_with_biases():
    torch = pytest.importorskip("torch")
    config = config_of("gpt_oss", "GptOssConfig", num_local_experts=8, num_experts_per_tok=2, intermediate_size=HIDDEN)
    config._experts_implementation = "eager"
    router = filled(module_of("gpt_oss", "GptOssTopKRouter")(config))
    experts = filled(module_of("gpt_oss", "GptOssExperts")(config), seed=3, spread=2.0)
    x = tokens_of()[:40]
    with torch.no_grad():
        logits, weights, indices = router(x)
        wanted = experts(x, indices, weights).numpy()
    found = compute.moe_route(logits.numpy(), 2, score="softmax_of_chosen")
    # transformers multiplies from the other side; rows of gate and up take turns.
    both = experts.gate_up_proj.detach().numpy().transpose(0, 2, 1)
    down = experts.down_proj.detach().numpy().transpose(0, 2, 1)
    of_both, of_down = (one.detach().numpy() for one in (experts.gate_up_proj_bias, experts.down_proj_bias))
    biases = of_both[:, 0::2], of_both[:, 1::2], of_down
    y = block(x.numpy(), found, (both[:, 0::2], both[:, 1::2], down), {"limit": 7.0, "alpha": 1.702}, biases)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.by_hand
def test_a_shared_expert_with_a_gate_is_qwen3_next():
    torch = pytest.importorskip("torch")
    config = config_of(
        "qwen3_next", "Qwen3NextConfig", num_experts=16, num_experts_per_tok=4, norm_topk_prob=True,
        moe_intermediate_size=HIDDEN, shared_expert_intermediate_size=HIDDEN,
    )  # fmt: skip
    made = filled(module_of("qwen3_next", "Qwen3NextSparseMoeBlock")(config))
    x = tokens_of()[:40]
    with torch.no_grad():
        wanted = made(x[None])[0].numpy()
        logits = made.gate(x)[0].numpy()
    found = compute.moe_route(logits, 4, normalise=True)
    both = made.experts.gate_up_proj.detach().numpy()
    hidden = both.shape[1] // 2
    y = block(x.numpy(), found, (both[:, :hidden], both[:, hidden:], made.experts.down_proj.detach().numpy()), {})
    shared = made.shared_expert
    gate, up, down = (one.weight.detach().numpy() for one in (shared.gate_proj, shared.up_proj, shared.down_proj))
    inner = compute.moe_activation(*(product(one, x.numpy()).astype(np.float32) for one in (gate, up)))
    # Its gate is a router of one expert: a sigmoid, and nothing is normalised.
    weight = product(made.shared_expert_gate.weight.detach().numpy(), x.numpy()).astype(np.float32)
    weight = compute.moe_route(weight, 1, score="sigmoid").weights
    np.testing.assert_allclose(y + weight * product(down, inner), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("name", ["epsilon", "factor"])
def test_numbers_of_a_rule_are_finite(name, number):
    with pytest.raises(nvme_gpu.Usage, match=f"{name} is "):
        compute.moe_route(np.zeros((2, 4), np.float32), 2, normalise=True, **{name: number})
