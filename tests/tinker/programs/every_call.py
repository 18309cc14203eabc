"""Every call of the API with the real client: training, losses, sampling, checkpoints, errors.

python every_call.py [NAME ...]     runs the checks whose names begin so; without names, all
"""

import io
import json
import pickle
import subprocess
import sys
import time
import traceback

import numpy as np
import tinker
import torch
from client import MODEL, apart, data_of, datum, logprobs_of, rows, same, service, step
from tinker import types

RANK = 8
CLIP = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}


class Once:
    """Clients that the checks share, made when first asked for."""

    def __init__(self):
        self.service = service()
        self.made = {}

    def new(self, **options):
        options = {"base_model": MODEL, "rank": RANK, "seed": 5, **options}
        return self.service.create_lora_training_client(**options).result()

    @property
    def training(self):
        if "training" not in self.made:
            self.made["training"] = self.new()
        return self.made["training"]

    @property
    def sampling(self):
        if "sampling" not in self.made:
            found = self.training.save_weights_and_get_sampling_client().result()
            self.made["sampling"] = found
        return self.made["sampling"]


def refused(words, call, *args, **kwargs):
    """The call ends in an error within 20 s that has all of the words."""
    began = time.monotonic()
    try:
        future = call(*args, **kwargs)
        if hasattr(future, "result"):
            future.result()
    except Exception as error:
        text = str(error)
        missing = [word for word in words if word.lower() not in text.lower()]
        assert not missing, f"{missing} not in {text!r}"
        assert time.monotonic() - began < 20, f"took {time.monotonic() - began:.1f} s: {text}"
        return text
    raise AssertionError(f"{words}: nothing was refused")


# --- the service, models -------------------------------------------------------------------------------


def check_capabilities(once):
    found = tinker.RestClient().get_server_capabilities().result()
    assert MODEL in [model.model_name for model in found.supported_models]


def check_info(once):
    info = once.training.get_info()
    assert info.lora_rank == RANK
    assert info.is_lora
    assert info.model_data.model_name == MODEL
    assert info.model_id.endswith(":train:0"), info.model_id


def check_tokenizers(once):
    text = "What is 2 + 3?"
    ids = once.training.get_tokenizer().encode(text)
    assert ids == once.sampling.get_tokenizer().encode(text)
    assert once.training.get_tokenizer().decode(ids) == text


def check_seeds_of_adapters(once):
    """The same seed gives the same adapters, another seed others."""
    ell = []
    for seed in (3, 3, 4):
        training = once.new(seed=seed)
        step(training, data_of(rows(1, 4)))
        ell.append(logprobs_of(training.forward(data_of(rows(1, 4)), "cross_entropy").result()))
    assert same(ell[0], ell[1])
    assert apart(ell[0], ell[2]) > 1e-6


def check_parts_that_are_not_trained(once):
    """train_mlp, train_attn and train_unembed each change what a step does; without a part it is another."""
    parts = ("train_mlp", "train_attn", "train_unembed")
    data, ell = data_of(rows(1, 4)), []
    for alone in (None, *parts):
        chosen = {} if alone is None else {part: part == alone for part in parts}
        training = once.new(**chosen)
        for _ in range(2):
            step(training, data, learning_rate=1e-2)
        ell.append(np.concatenate(logprobs_of(training.forward(data, "cross_entropy").result())))
    for i in range(len(ell)):
        for j in range(i):
            assert np.abs(ell[i] - ell[j]).max() > 1e-4, (i, j)


def check_refused_models(once):
    refused(["rank"], once.new, rank=0)
    refused(["rank"], once.new, rank=100_000)
    refused([MODEL], once.new, base_model="Qwen/No-Such-Model")
    refused(["adamw"], once.new, optimizer=types.DimuonOptimizerConfig())


# --- passes and steps ----------------------------------------------------------------------------------


def check_forward(once):
    """ℓ is returned for all rows, also where the weight is 0; loss:sum is the weighted sum."""
    weights = np.random.default_rng(0).normal(size=(5, 11)).astype(np.float32)
    weights[:, :3] = 0
    sequences = rows(2, 5)
    data = [datum(tokens, weights=w) for tokens, w in zip(sequences, weights)]
    passed = once.training.forward(data, "cross_entropy").result()
    ell = logprobs_of(passed)
    assert [a.shape for a in ell] == [(11,)] * 5
    assert all((a < 0).all() for a in ell)
    expected = -sum(float((w * a).sum()) for w, a in zip(weights.astype(np.float64), ell))
    assert abs(passed.metrics["loss:sum"] - expected) < 1e-3, (passed.metrics, expected)
    assert all(name.count(":") == 1 for name in passed.metrics)
    default = once.training.forward([datum(tokens) for tokens in sequences], "cross_entropy").result()
    assert apart(logprobs_of(default), ell) < 1e-5
    assert abs(default.metrics["loss:sum"] + sum(float(a.sum()) for a in ell)) < 1e-3


def check_forward_changes_nothing(once):
    training, data = once.new(), data_of(rows(3, 4))
    before = training.forward(data, "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1.0)).result()  # without a gradient
    after = training.forward(data, "cross_entropy").result()
    assert same(logprobs_of(before), logprobs_of(after))


def check_lengths(once):
    """Sequences of one token and of many, in one call, in the order given."""
    rng = np.random.default_rng(4)
    sequences = [rng.integers(0, 200, n).tolist() for n in (2, 90, 3, 40, 2, 17)]
    together = logprobs_of(once.training.forward(data_of(sequences), "cross_entropy").result())
    alone = [
        logprobs_of(once.training.forward(data_of([each]), "cross_entropy").result())[0] for each in sequences
    ]
    assert apart(together, alone) < 1e-4


def check_arbitrary_targets(once):
    """Targets need not be the next tokens."""
    tokens, targets = rows(5, 1)[0], rows(6, 1)[0]
    arbitrary = types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": np.asarray(targets), "weights": np.ones(12, np.float32)},
    )
    found = logprobs_of(once.training.forward([arbitrary], "cross_entropy").result())[0]
    for place in (0, 7, 11):
        whole = [*tokens[: place + 1], targets[place]]
        one = logprobs_of(once.training.forward(data_of([whole]), "cross_entropy").result())[0]
        assert abs(one[-1] - found[place]) < 1e-4


def check_several_targets(once):
    """[T, K] targets, dense and sparse: the ℓ of each cell, and a step that both take alike."""
    tokens = rows(7, 1)[0]
    rng = np.random.default_rng(8)
    targets = np.stack([rng.permutation(250)[:4] for _ in range(12)])
    weights = rng.random((12, 4)).astype(np.float32)
    weights[:, 1:] *= rng.random((12, 3)) < 0.3
    model_input = types.ModelInput.from_ints(tokens)
    dense = types.Datum(
        model_input=model_input,
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(targets.astype(np.int64)),
            "weights": types.TensorData.from_numpy(weights),
        },
    )
    training = once.new()
    passed = training.forward([dense], "cross_entropy").result()
    found = logprobs_of(passed)[0]
    assert found.shape == (12, 4)
    for column in range(4):
        one = types.Datum(
            model_input=model_input, loss_fn_inputs={"target_tokens": targets[:, column].astype(np.int64)}
        )
        alone = logprobs_of(training.forward([one], "cross_entropy").result())[0]
        assert np.abs(alone - found[:, column]).max() < 1e-4
    assert abs(passed.metrics["loss:sum"] + float((weights * found).sum())) < 1e-3

    listed = weights != 0
    crow = np.concatenate([[0], np.cumsum(listed.sum(1))]).tolist()
    columns = np.nonzero(listed)[1].tolist()

    def csr(values, dtype):
        return types.TensorData(
            data=values[listed].tolist(),
            dtype=dtype,
            shape=[12, 4],
            sparse_crow_indices=crow,
            sparse_col_indices=columns,
        )

    sparse = types.Datum(
        model_input=model_input,
        loss_fn_inputs={"target_tokens": csr(targets, "int64"), "weights": csr(weights, "float32")},
    )
    other = once.new()
    both = [step(one, [each])[0] for one, each in ((training, dense), (other, sparse))]
    assert abs(both[0].metrics["loss:sum"] - both[1].metrics["loss:sum"]) < 1e-3
    after = [logprobs_of(one.forward([dense], "cross_entropy").result()) for one in (training, other)]
    assert apart(*after) < 1e-4
    assert apart(after[0], [found]) > 1e-4


def check_training_learns(once):
    training, data = once.new(), data_of(rows(9, 8))
    losses, norms = [], []
    for _ in range(8):
        passed, stepped = step(training, data, learning_rate=1e-2)
        losses.append(passed.metrics["loss:sum"])
        norms += [value for name, value in (stepped.metrics or {}).items() if "grad_norm" in name]
    assert losses[-1] < 0.8 * losses[0], losses
    assert len(norms) >= 8
    assert all(norm > 0 for norm in norms)


def check_sums_of_passes(once):
    """Two passes and one step are one pass of both."""
    first, second = rows(10, 4), rows(11, 3)
    ell = []
    for parts in ((first, second), (first + second,)):
        training = once.new()
        for part in parts:
            training.forward_backward(data_of(part), "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        ell.append(logprobs_of(training.forward(data_of(first), "cross_entropy").result()))
    assert apart(*ell) < 1e-4


def check_clipping_and_decay(once):
    """grad_clip_norm and weight_decay reach the step."""
    data, ell = data_of(rows(12, 4)), []
    for numbers in ({}, {"grad_clip_norm": 1e-6, "eps": 1e-3}, {"eps": 1e-3}, {"weight_decay": 50.0}):
        training = once.new()
        for _ in range(3):
            step(training, data, learning_rate=5e-3, **numbers)
        ell.append(np.concatenate(logprobs_of(training.forward(data, "cross_entropy").result())))
    assert all(np.abs(ell[i] - ell[j]).max() > 1e-4 for i in range(4) for j in range(i))


# --- losses --------------------------------------------------------------------------------------------


def ratio_data(ell, seed):
    """Rows with advantages and the log-probabilities of an older policy near `ell`."""
    rng = np.random.default_rng(seed)
    made = []
    for tokens, each in zip(rows(13, len(ell)), ell):
        advantages = rng.normal(size=each.shape).astype(np.float32)
        advantages[:2] = 0
        old = (each + rng.normal(size=each.shape) * 0.2).astype(np.float32)
        made.append((tokens, old, advantages))
    return made


def formula(loss, ell, old, advantages, config):
    """The sum of a datum, in torch."""
    ratio = torch.exp(ell - old)
    low, high = config.get("clip_low_threshold"), config.get("clip_high_threshold")
    if loss == "importance_sampling":
        return -(ratio * advantages).sum()
    if loss == "ppo":
        return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()
    if loss == "cispo":
        return -(ratio.detach().clamp(low, high) * advantages * ell).sum()
    if loss == "dro":
        rows = advantages != 0
        return -(advantages * ell - 0.5 * config["beta"] * rows * (ell - old) ** 2).sum()
    assert loss == "gspo"
    rows = advantages != 0
    mean = (ell - old)[rows].mean()
    s = torch.exp(mean.detach() + ell - ell.detach())
    return -torch.minimum(s * advantages, s.clamp(low, high) * advantages)[rows].sum()


LOSSES = {
    "importance_sampling": {},
    "ppo": CLIP,
    "cispo": CLIP,
    "dro": {"beta": 0.3},
    "gspo": CLIP,
}


def check_losses(once):
    """Each loss has the value of its formula, and takes the step that this formula takes as a custom loss."""
    ell = logprobs_of(once.training.forward(data_of(rows(13, 3)), "cross_entropy").result())
    for loss, config in LOSSES.items():
        made = ratio_data(ell, seed=14)
        data = [datum(tokens, logprobs=old, advantages=a) for tokens, old, a in made]
        one, other = once.new(), once.new()
        passed = one.forward_backward(data, loss, config).result()
        at = logprobs_of(passed)
        expected = sum(
            float(formula(loss, *map(torch.tensor, (each, old, a)), config))
            for each, (_, old, a) in zip(at, made)
        )
        assert abs(passed.metrics["loss:sum"] - expected) < 1e-3, (loss, passed.metrics, expected)
        one.optim_step(types.AdamParams(learning_rate=1e-3)).result()

        def stated(_, logprobs, loss=loss, config=config, made=made):
            total = sum(
                formula(loss, each, torch.tensor(old), torch.tensor(a), config)
                for each, (_, old, a) in zip(logprobs, made)
            )
            return total, {"mine": 1.0}

        custom = other.forward_backward_custom(data, stated).result()
        assert custom.metrics["mine"] == 1.0
        assert abs(custom.metrics["loss:sum"] - expected) < 1e-3
        other.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        after = [
            logprobs_of(training.forward(data_of(rows(13, 3)), "cross_entropy").result())
            for training in (one, other)
        ]
        assert apart(*after) < 1e-4, (loss, apart(*after))
        assert apart(after[0], at) > 1e-5, loss


def check_thresholds_by_row(once):
    ell = logprobs_of(once.training.forward(data_of(rows(13, 3)), "cross_entropy").result())
    made = ratio_data(ell, seed=15)
    plain = [datum(tokens, logprobs=old, advantages=a) for tokens, old, a in made]
    by_row = [
        datum(
            tokens,
            logprobs=old,
            advantages=a,
            **{name: np.full(old.shape, value) for name, value in CLIP.items()},
        )
        for tokens, old, a in made
    ]
    one = once.training.forward(plain, "ppo", CLIP).result()
    other = once.training.forward(by_row, "ppo").result()
    default = once.training.forward(plain, "ppo").result()
    assert abs(one.metrics["loss:sum"] - other.metrics["loss:sum"]) < 1e-4
    assert abs(one.metrics["loss:sum"] - default.metrics["loss:sum"]) > 1e-3


def check_refused_losses(once):
    data, training = data_of(rows(16, 2)), once.new()
    ratios = [datum(tokens, logprobs=np.zeros(11), advantages=np.ones(11)) for tokens in rows(16, 2)]
    for call in (training.forward, training.forward_backward):
        refused(["stable_reinforce", "ppo"], call, ratios, "stable_reinforce")
    refused(["dro", "beta"], training.forward, ratios, "dro")
    refused(["advantages"], training.forward, data, "ppo")
    refused(["mask"], training.forward, [strange("mask")], "cross_entropy")
    refused(["step not taken", "stable_reinforce"], training.optim_step, types.AdamParams())
    step(training, data)


def strange(name):
    tokens = rows(17, 1)[0]
    made = datum(tokens)
    inputs = {**made.loss_fn_inputs, name: types.TensorData.from_numpy(np.ones(11, np.float32))}
    return types.Datum(model_input=made.model_input, loss_fn_inputs=inputs)


def check_refused_data(once):
    """Each kind of bad datum is a clear error, after which the same client trains on."""
    training = once.new()
    good = rows(18, 1)[0]
    before = logprobs_of(training.forward(data_of([good]), "cross_entropy").result())
    nothing = np.full(11, np.nan)
    too_long = np.random.default_rng(0).integers(0, 99, 100_000).tolist()
    image = types.ModelInput(chunks=[types.ImageChunk(data=b"12", format="png", expected_tokens=1)])
    cases = {
        ("weights",): [datum(good, weights=nothing)],
        ("target_tokens",): [datum([*good, 10_000_000])],
        ("positions",): [datum(too_long)],
        ("weights", "11"): [datum(good, weights=np.ones(5))],
        ("text",): [types.Datum(model_input=image, loss_fn_inputs={"target_tokens": np.asarray([1])})],
    }
    for words, data in cases.items():
        refused(words, training.forward, data, "cross_entropy")
    after = logprobs_of(training.forward(data_of([good]), "cross_entropy").result())
    assert same(before, after)


def check_a_failed_gradient_is_void(once):
    """The step after a failed pass fails, and names it; then all is as before."""
    training, other, data = once.new(), once.new(), data_of(rows(19, 3))
    training.forward_backward(data, "cross_entropy")  # is lost with the failed one
    failed = training.forward_backward([strange("mask")], "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
    refused(["mask"], failed.result)
    refused(["step not taken"], stepped.result)
    for one in (training, other):
        step(one, data)
    ell = [logprobs_of(one.forward(data, "cross_entropy").result()) for one in (training, other)]
    assert same(*ell)


def check_many_data(once):
    """More data than a chunk has: the chunks' results come back in the order of the data."""
    sequences = rows(20, 1300, length=4)
    passed = once.training.forward(data_of(sequences), "cross_entropy").result()
    ell = logprobs_of(passed)
    assert len(ell) == 1300
    for place in (0, 700, 1299):
        alone = once.training.forward(data_of([sequences[place]]), "cross_entropy").result()
        assert apart(logprobs_of(alone), [ell[place]]) < 1e-4
    assert abs(passed.metrics["loss:sum"] + sum(float(each.sum()) for each in ell)) < 0.1


# --- sampling ------------------------------------------------------------------------------------------


def sample(once, prompt, n=1, sampling=None, **params):
    asked = {"max_tokens": 8, "stop": [], **params}
    extra = {
        key: asked.pop(key) for key in list(asked) if key.startswith(("include", "topk", "target", "prompt"))
    }
    asked = types.SamplingParams(**asked)
    sampling = sampling or once.sampling
    return sampling.sample(types.ModelInput.from_ints(prompt), n, asked, **extra).result()


def check_samples(once):
    prompt = rows(21, 1)[0]
    found = sample(once, prompt, 5)
    assert len(found.sequences) == 5
    assert len({each.sequence_id for each in found.sequences}) == 5
    assert all(len(each.tokens) == len(each.logprobs) == 8 for each in found.sequences)
    assert all(each.stop_reason == "length" for each in found.sequences)
    assert len({tuple(each.tokens) for each in found.sequences}) > 1
    again = sample(once, prompt, 5)
    assert {tuple(each.tokens) for each in again.sequences} != {
        tuple(each.tokens) for each in found.sequences
    }


def check_seeds_of_samples(once):
    """A request with a seed, asked of a fresh sampler of the same weights, has the same tokens."""
    prompt = rows(22, 1)[0]
    tokens = []
    for seed in (7, 7, 8):
        sampling = once.training.save_weights_and_get_sampling_client().result()
        tokens.append([each.tokens for each in sample(once, prompt, 3, sampling, seed=seed).sequences])
    assert tokens[0] == tokens[1] != tokens[2]


def check_greedy(once):
    prompt = rows(23, 1)[0]
    found = sample(once, prompt, 2, temperature=0.0, topk_sample_logprobs=3)
    assert found.sequences[0].tokens == found.sequences[1].tokens
    for each in found.sequences:
        assert [likeliest[0][0] for likeliest in each.topk_logprobs] == each.tokens
        assert all(len(likeliest) == 3 for likeliest in each.topk_logprobs)


def check_filters(once):
    """top_k 1 is greedy, and so is a tiny top_p."""
    prompt = rows(24, 1)[0]
    greedy = sample(once, prompt, temperature=0.0).sequences[0].tokens
    assert sample(once, prompt, top_k=1).sequences[0].tokens == greedy
    assert sample(once, prompt, top_p=1e-6).sequences[0].tokens == greedy


def check_stops(once):
    """A stop token and the token that completes a stop string are among the tokens; [] stops nothing."""
    prompt = rows(25, 1)[0]
    free = sample(once, prompt, max_tokens=24, temperature=0.0).sequences[0].tokens
    place = next(i for i in range(1, 24) if free[i] not in free[:i])
    found = sample(once, prompt, max_tokens=24, temperature=0.0, stop=[free[place]]).sequences[0]
    assert found.tokens == free[: place + 1]
    assert found.stop_reason == "stop"
    tokenizer = once.sampling.get_tokenizer()
    text = tokenizer.decode(free)
    for width in (1, 2, 3):
        middle = next(
            (text[i : i + width] for i in range(2, len(text) - width) if text[i : i + width].isascii()), None
        )
        if middle is None:
            continue
        found = sample(once, prompt, max_tokens=24, temperature=0.0, stop=[middle]).sequences[0]
        decoded = tokenizer.decode(found.tokens)
        assert found.stop_reason == "stop"
        assert middle in decoded
        assert middle not in tokenizer.decode(found.tokens[:-1])
        assert found.tokens == free[: len(found.tokens)]


def check_prompt_logprobs(once):
    prompt = rows(26, 1, length=20)[0]
    ell = logprobs_of(once.training.forward(data_of([prompt]), "cross_entropy").result())[0]
    sampling = once.training.save_weights_and_get_sampling_client().result()
    found = sample(once, prompt, sampling=sampling, include_prompt_logprobs=True, topk_prompt_logprobs=4)
    assert found.prompt_logprobs[0] is None
    assert found.topk_prompt_logprobs[0] is None
    assert np.abs(np.asarray(found.prompt_logprobs[1:], np.float32) - ell).max() < 1e-4
    for own, likeliest in zip(found.prompt_logprobs[1:], found.topk_prompt_logprobs[1:]):
        values = [value for _, value in likeliest]
        assert len(likeliest) == 4
        assert values == sorted(values, reverse=True)
        assert own <= values[0] + 1e-5
    computed = sampling.compute_logprobs(types.ModelInput.from_ints(prompt)).result()
    assert np.abs(np.asarray(computed[1:]) - ell).max() < 1e-4
    last = sampling.compute_logprobs(types.ModelInput.from_ints(prompt), prompt_logprobs_last_n=5).result()
    assert last[:-5] == [None] * 15
    assert np.abs(np.asarray(last[-5:]) - ell[-5:]).max() < 1e-4


def check_target_prompt_logprobs(once):
    prompt = rows(27, 1, length=10)[0]
    ids = torch.full((9, 3), -1, dtype=torch.int64)
    ids[:, 0] = torch.tensor(prompt[1:])
    ids[4, 2] = 77
    ell = logprobs_of(once.training.forward(data_of([prompt]), "cross_entropy").result())[0]
    sampling = once.training.save_weights_and_get_sampling_client().result()
    other = logprobs_of(once.training.forward(data_of([[*prompt[:5], 77]]), "cross_entropy").result())[0][-1]
    for target in (types.TensorData.from_torch(ids), types.TensorData.from_torch_sparse(ids, pad_value=-1)):
        found = sample(once, prompt, sampling=sampling, target_prompt_logprobs=target).target_prompt_logprobs
        values = (
            found.to_torch().numpy() if found.sparse_crow_indices is None else found.to_torch().to_dense()
        )
        values = np.asarray(values).reshape(9, 3)
        assert np.abs(values[:, 0] - ell).max() < 1e-4
        assert abs(values[4, 2] - other) < 1e-4
        assert values[0, 1] == 0.0, values  # where -1 was asked


def check_kept_contexts(once):
    """The second of two requests with a long common prefix need not compute it again, and draws alike."""
    prompt = np.random.default_rng(28).integers(0, 200, 150).tolist()
    sampling = once.training.save_weights_and_get_sampling_client().result()
    sample(once, prompt, sampling=sampling, temperature=0.0)
    found = sample(once, [*prompt, 5, 6], sampling=sampling, temperature=0.0)
    fresh = once.training.save_weights_and_get_sampling_client().result()
    assert sample(once, [*prompt, 5, 6], sampling=fresh, temperature=0.0).sequences[0].tokens == (
        found.sequences[0].tokens
    )
    return {"cached_tokens": found.prompt_cache_hit_tokens}


def check_snapshots_do_not_change(once):
    training, prompt = once.new(), rows(29, 1)[0]
    sampling = training.save_weights_and_get_sampling_client().result()
    before = sampling.compute_logprobs(types.ModelInput.from_ints(prompt)).result()
    step(training, data_of([prompt]), learning_rate=1e-2)
    after = training.save_weights_and_get_sampling_client(kind="inflight").result()
    assert sampling.compute_logprobs(types.ModelInput.from_ints(prompt)).result() == before
    changed = after.compute_logprobs(types.ModelInput.from_ints(prompt)).result()
    assert np.abs(np.asarray(changed[1:]) - np.asarray(before[1:])).max() > 1e-3


def check_the_base_model(once):
    """A sampler of the base has the ℓ of a model whose adapters do nothing yet."""
    prompt = rows(30, 1)[0]
    base = once.service.create_sampling_client(base_model=MODEL).result()
    assert base.get_base_model() == MODEL
    ell = logprobs_of(once.new().forward(data_of([prompt]), "cross_entropy").result())[0]
    found = base.compute_logprobs(types.ModelInput.from_ints(prompt)).result()
    assert np.abs(np.asarray(found[1:]) - ell).max() < 1e-4


def check_refused_samples(once):
    prompt = rows(31, 1)[0]
    model_input = types.ModelInput.from_ints(prompt)

    def ask(model_input=model_input, n=1, extra=None, **params):
        params = types.SamplingParams(**{"max_tokens": 4, **params})
        return once.sampling.sample(model_input, n, params, **(extra or {}))

    refused(["prompt"], ask, types.ModelInput.empty())
    refused(["prompt_alt_tokens_k"], ask, extra={"prompt_alt_tokens_k": 2})
    refused(["num_samples"], ask, n=0)
    refused(["num_samples"], ask, n=100_000)
    refused(["temperature"], ask, temperature=-1.0)
    refused(["temperature"], ask, temperature=1e-3)
    refused(["stop"], ask, stop=list(range(65)))
    refused(["top_p"], ask, top_p=1.5)
    refused(["positions"], ask, types.ModelInput.from_ints([1] * 100_000))
    image = types.ModelInput(chunks=[types.ImageChunk(data=b"12", format="png", expected_tokens=1)])
    refused(["text"], ask, image)
    refused(["token"], ask, types.ModelInput.from_ints([1, 10_000_000]))
    assert len(sample(once, prompt).sequences[0].tokens) == 8


def check_samplers_in_other_processes(once):
    """A pickled copy and a handle each draw in another process, under numbers of their own."""
    code = (
        "import pickle, sys\nfrom tinker import SamplingClient, types\n"
        "given = pickle.load(sys.stdin.buffer)\n"
        "one = SamplingClient.from_sampler_handle(given) if isinstance(given, str) else given\n"
        "asked = types.SamplingParams(max_tokens=3, stop=[])\n"
        "found = one.sample(types.ModelInput.from_ints([1, 2, 3]), 2, asked).result()\n"
        "print([len(each.tokens) for each in found.sequences])\n"
    )
    for given in (once.sampling, once.sampling, once.sampling.get_sampler_handle()):
        written = io.BytesIO()
        pickle.dump(given, written)
        done = subprocess.run([sys.executable, "-c", code], input=written.getvalue(), capture_output=True)
        assert done.stdout.split() == b"[3, 3]".split(), done.stderr[-1500:]


def check_many_samples_at_once(once):
    """64 requests in flight end, each with its own prompt's tokens."""
    prompts = rows(32, 64, length=6)
    asked = types.SamplingParams(max_tokens=4, stop=[], temperature=0.0)
    sampling = once.sampling
    futures = [sampling.sample(types.ModelInput.from_ints(prompt), 1, asked) for prompt in prompts]
    found = [future.result().sequences[0] for future in futures]
    for place in (0, 20, 63):
        alone = sampling.sample(types.ModelInput.from_ints(prompts[place]), 1, asked).result().sequences[0]
        assert alone.tokens == found[place].tokens


# --- checkpoints ---------------------------------------------------------------------------------------


def check_checkpoints(once):
    """What is saved goes on to the bit, with the optimizer; without it, from the weights alone."""
    training, data = once.new(), data_of(rows(33, 4))
    for _ in range(3):
        step(training, data)
    path = training.save_state("three").result().path
    assert path == f"tinker://{training.model_id}/weights/three"
    with_optimizer = once.service.create_training_client_from_state_with_optimizer(path).result()
    without = once.service.create_training_client_from_state(path).result()
    assert with_optimizer.get_info().lora_rank == RANK
    ell = []
    for one in (training, with_optimizer, without):
        before = logprobs_of(one.forward(data, "cross_entropy").result())
        step(one, data)
        ell.append((before, logprobs_of(one.forward(data, "cross_entropy").result())))
    assert same(ell[0][0], ell[1][0])
    assert same(ell[0][1], ell[1][1])
    assert same(ell[0][0], ell[2][0])
    assert apart(ell[0][1], ell[2][1]) > 1e-6
    refused(["three"], training.save_state, "three")
    training.save_state("three", overwrite=True).result()
    training.load_state_with_optimizer(path).result()
    assert same(logprobs_of(training.forward(data, "cross_entropy").result()), ell[0][1])


def check_sampler_weights(once):
    training, prompt = once.new(), rows(34, 1)[0]
    step(training, data_of([prompt]), learning_rate=1e-2)
    path = training.save_weights_for_sampler("sampled", ttl_seconds=3600).result().path
    assert path == f"tinker://{training.model_id}/sampler_weights/sampled"
    live = training.save_weights_and_get_sampling_client().result()
    found = [live, training.create_sampling_client(path).result()]
    found.append(once.service.create_sampling_client(model_path=path).result())
    state = training.save_state("sampled").result().path
    found.append(once.service.create_sampling_client(model_path=state).result())
    ell = [np.asarray(one.compute_logprobs(types.ModelInput.from_ints(prompt)).result()[1:]) for one in found]
    assert all(np.abs(each - ell[0]).max() < 1e-5 for each in ell[1:])
    assert found[1].get_base_model() == MODEL
    greedy = [sample(once, prompt, sampling=one, temperature=0.0).sequences[0].tokens for one in found]
    assert all(each == greedy[0] for each in greedy)


def check_refused_paths(once):
    training = once.training
    for name in ("../up", "a/b", "", "x" * 200, "tab\tname"):
        refused([], training.save_state, name)
    create = once.service.create_training_client_from_state
    for path in (
        "tinker://no-such:train:0/weights/x",
        f"tinker://{training.model_id}/weights/no-such",
        "tinker://../../etc/weights/passwd",
        "/etc/passwd",
    ):
        refused([], create, path)
        refused([], once.service.create_sampling_client, model_path=path)
    step(training, data_of(rows(35, 2)), learning_rate=0.0)


def check_records(once):
    """Training runs, checkpoints, sessions: what was made is listed, and can be deleted."""
    training = once.new(user_metadata={"purpose": "records"})
    path = training.save_state("one", user_metadata={"step": "0"}).result().path
    other = training.save_weights_for_sampler("two").result().path
    rest = tinker.RestClient()
    run = rest.get_training_run(training.model_id).result()
    assert run.training_run_id == training.model_id
    assert run.base_model == MODEL
    assert run.lora_rank == RANK
    assert run.user_metadata["purpose"] == "records"
    assert rest.get_training_run_by_tinker_path(path).result().training_run_id == training.model_id
    listed = rest.list_training_runs(limit=100).result()
    assert training.model_id in [each.training_run_id for each in listed.training_runs]
    checkpoints = {
        each.tinker_path: each for each in rest.list_checkpoints(training.model_id).result().checkpoints
    }
    assert set(checkpoints) == {path, other}
    assert checkpoints[path].checkpoint_type == "training"
    assert checkpoints[path].size_bytes > 0
    assert checkpoints[path].user_metadata == {"step": "0"}
    every = rest.list_user_checkpoints(limit=1000).result().checkpoints
    assert {path, other} <= {each.tinker_path for each in every}
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank, info.train_unembed) == (MODEL, RANK, True)
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    checkpoints = {
        each.tinker_path: each for each in rest.list_checkpoints(training.model_id).result().checkpoints
    }
    assert checkpoints[path].expires_at is not None
    rest.delete_checkpoint_from_tinker_path(other).result()
    assert [each.tinker_path for each in rest.list_checkpoints(training.model_id).result().checkpoints] == [
        path
    ]
    refused([], once.service.create_sampling_client, model_path=other)
    session = training.model_id.partition(":")[0]
    assert session in rest.list_sessions(limit=100).result().sessions
    assert training.model_id in rest.get_session(session).result().training_run_ids
    refused([], training.save_weights_external, "x")


def check_other_keys(once):
    """Another key sees nothing of this one's."""
    path = once.training.save_state("mine", overwrite=True).result().path
    other = tinker.ServiceClient(api_key="tml-another")
    refused([], other.create_sampling_client, model_path=path)
    rest = tinker.RestClient(api_key="tml-another")
    assert rest.list_user_checkpoints(limit=100).result().checkpoints == []
    other.close("success").result()


def check_a_closed_session(once):
    """After close its models are gone, and a call for one is an error at once, not a wait."""
    with service() as closed:
        training = closed.create_lora_training_client(MODEL, rank=RANK).result()
        model_id = training.model_id
        path = training.save_state("kept").result().path
    training = once.new()
    training.model_id = model_id
    refused([], training.forward, data_of(rows(36, 1)), "cross_entropy")
    kept = once.service.create_training_client_from_state(path).result()
    kept.forward(data_of(rows(36, 1)), "cross_entropy").result()


def main():
    once, failed, took = Once(), [], {}
    names = sys.argv[1:]
    checks = [name for name in globals() if name.startswith("check_")]
    for name in checks:
        short = name.removeprefix("check_")
        if names and not any(short.startswith(each) for each in names):
            continue
        began = time.monotonic()
        try:
            said = globals()[name](once)
            print(f"ok      {time.monotonic() - began:6.1f} s  {short}  {said or ''}", flush=True)
        except Exception:
            failed.append(short)
            print(f"FAILED  {time.monotonic() - began:6.1f} s  {short}\n{traceback.format_exc()}", flush=True)
        took[short] = round(time.monotonic() - began, 2)
    print(json.dumps({"failed": failed, "seconds": took}))


if __name__ == "__main__":
    main()
