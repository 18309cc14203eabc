"""A teacher behind `quatrain serve`: what it scores, as a model in this process does, and what is refused."""

import numpy as np
import pytest
from runs import small_run
from servers import served, service_of
from tokenizers import normalizers

from quatrain.data.builtin import builtin_tokenizer
from quatrain.data.tokenizer import save_tokenizer
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.loop.train import train
from quatrain.run.metrics import read_metrics
from quatrain.update.server_teacher import ServerTeacher
from quatrain.weights.hf import save_hf


@pytest.fixture(scope="module")
def address(small_arch, small_params, tokenizer):
    service = service_of(small_arch, small_params, tokenizer)
    with served(service, small_arch, tokenizer) as url:
        yield url


def test_its_scores_are_those_of_the_model_in_this_process(
    address, small_arch, small_params, tokenizer, make_batch
):
    table = TokenTable.of(make_batch(0, groups=6, holes=True).rollouts)
    own = predict_tokens(small_params, table, model=PolicySpec(small_arch), planner=MicroBatchPlanner(rows=4))
    found = ServerTeacher(address, tokenizer, timeout_s=60).scores(table).logprobs
    assert np.abs(own).max() > 1
    np.testing.assert_allclose(found, own, atol=1e-4)
    assert not found[~table.completion_mask].any()


def test_another_tokenizer_is_refused(address):
    other = builtin_tokenizer()
    other.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(ValueError, match=r"must have the policy's tokenizer; it reads 'Hello, world!'"):
        ServerTeacher(address, other, timeout_s=60)


def test_a_server_that_is_gone_ends_the_run_after_a_while(tokenizer):
    with pytest.raises(ConnectionError, match=r"did not answer for 0.1 s \(rollout.timeout_s\)"):
        ServerTeacher("http://127.0.0.1:9", tokenizer, timeout_s=0.1)


def test_what_is_no_such_server_is_refused(address, tokenizer):
    with pytest.raises(ValueError, match="refused a question: status 404"):
        ServerTeacher(f"{address}/nowhere", tokenizer, timeout_s=5)


def test_a_run_with_the_served_model_is_at_its_teacher(
    address, small_arch, small_params, tokenizer, tmp_path
):
    save_hf(tmp_path / "policy", small_arch, small_params)
    save_tokenizer(tokenizer, tmp_path / "policy")
    same = (f"model.path={tmp_path / 'policy'}", f"distill.teacher={address}", "reward.functions={}")
    plain = ("sft.steps=0", "update.kl_coef=0", "run.steps=1", "eval.every_steps=0", "eval.before=false")
    run = train(small_run(tmp_path, "served", *same, *plain)).run
    (step,) = [row for row in read_metrics(run / "metrics.jsonl") if "distill/kl" in row]
    assert abs(step["distill/kl"]) < 1e-4
    assert step["distill/teacher_logprob"] < -1
