import ast
import inspect
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import small_run

from quatrain.config.load import load_config
from quatrain.loop import build
from quatrain.loop.policy import load_policy
from quatrain.loop.stages import build_engine, keeping_environments
from quatrain.loop.train import dry_run
from quatrain.models.architecture import LoRA
from quatrain.rollout.publish import gathered
from quatrain.rollout.start_fleet import servers
from quatrain.update.learner import Learner
from quatrain.update.teacher import TeacherLoader


def _load(*overrides):
    return load_policy(load_config(None, overrides, environ={}).config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mesh=2,1,1", "mesh must be the number of devices; got dp 2, fsdp 1, tp 1 for 1 devices"),
        ("rollout.mesh=1,1,3", "rollout.mesh must be the number of devices; got dp 1, fsdp 1, tp 3"),
    ],
)
def test_a_mesh_of_other_devices_than_there_are_is_refused(override, message):
    with pytest.raises(ValueError, match=message):
        _load(override)


def test_the_engine_decodes_where_the_weights_are():
    loaded = _load()
    config = load_config(None, environ={}).config
    meshes = loaded.meshes
    engine = build_engine(config, loaded).sampler.engine
    assert meshes.train == meshes.rollout == meshes.reference == engine.mesh
    assert {leaf.sharding.mesh for leaf in loaded.params["layers"][0].values()} == {meshes.train}


def test_a_critic_is_loaded_only_where_it_is_used(tmp_path):
    settings = ["advantage.estimator=gae", f"critic.path={tmp_path / 'nowhere'}"]
    config = load_config(None, settings, environ={}).config
    with pytest.raises(ValueError, match=r"critic\.path .*nowhere"):
        load_policy(config)
    assert load_policy(config, critic=False).critic_arch is None  # as for an evaluation or an export


def test_episodes_of_an_evaluation_may_be_longer_than_those_of_training(tmp_path):
    """Training is bounded by its tokens sampled and given, an evaluation by its own; both by positions."""
    path = tmp_path / "environment.py"
    path.write_text("class Silent:\n    def step(self, completion):\n        return None\n", "utf-8")
    settings = [f"rollout.environment={path}:Silent", "rollout.max_new_tokens=4", "eval.max_new_tokens=64"]
    config = load_config(None, settings, environ={}).config
    loaded = load_policy(config)
    with closing(build_engine(config, loaded)) as engine:
        assert engine.player.rules.max_tokens == loaded.arch.max_position


def test_a_users_loss_that_reads_the_sampler_needs_its_distribution(tmp_path):
    """As `dppo`, which a rule of the configuration refuses."""
    (tmp_path / "mine.py").write_text(
        "from quatrain.ops.tokens import TokenLoss\n\n"
        "def own(tokens):\n    return TokenLoss(tokens.logprobs * tokens.rollout_logprobs)\n"
    )
    whole, filtered = (
        load_config(None, [f"update.loss={tmp_path}/mine.py:own", *more], environ={}).config
        for more in (["rollout.top_p=0.9"], ["rollout.top_p=0.9", "rollout.replay_mask=false"])
    )
    loaded = load_policy(whole)
    assert Learner.of(whole, loaded, steps=1).reads_sampler
    with pytest.raises(ValueError, match="reads the sampler's log-probabilities, which must"):
        Learner.of(filtered, loaded, steps=1)


def test_a_teacher_is_loaded_for_the_longest_sequence_that_it_reads():
    """That of an evaluation, and with a prompt of its own that is longer than the policy's may be."""
    settings = ["distill.teacher=tiny", "data.max_prompt_length=40", "rollout.max_new_tokens=16"]
    settings.append("eval.max_new_tokens=24")
    config = load_config(None, settings, environ={}).config
    loaded = load_policy(config)
    longest = [TeacherLoader(config, loaded, prompt).longest for prompt in (0, 40, 55)]
    assert longest == [64, 64, 79]


def test_a_server_loads_no_output_head_beside_the_embeddings(tmp_path):
    """It would take one of both in place of the other: its samples would be of other weights."""
    settings = (f"run.dir={tmp_path}", "run.name=r", "rollout.servers=[http://127.0.0.1:9]")
    config, loaded = load_config(None, settings, environ={}).config, _load()
    adapted = replace(loaded.arch, lora=LoRA(2, 2.0, ("o", "lm_head")))
    with pytest.raises(ValueError, match=r"lm_head with rollout.servers .* tied to the embeddings"):
        servers(config, replace(loaded, arch=adapted))
    assert servers(config, replace(loaded, arch=replace(adapted, tie_embeddings=False)))


def test_runs_with_one_weights_dir_keep_their_weights_apart(tmp_path):
    """Two of the same name in other folders, and one that was killed and is resumed."""

    def publisher_of(runs):
        settings = (f"run.dir={tmp_path / runs}", "run.name=r", "rollout.servers=[http://127.0.0.1:9]")
        config = load_config(None, [*settings, f"rollout.weights_dir={tmp_path / 'w'}"], environ={}).config
        return servers(config, loaded)[1]

    loaded = _load()
    weights = gathered(loaded.params, "float32")
    one, other, resumed = (publisher_of(runs) for runs in ("a", "b", "a"))
    first, second = (Path(each.publish(weights, 3)) for each in (one, other))
    assert first.parent != second.parent
    assert first.parent.name.startswith("r-")
    other.close()
    assert (first / "model.safetensors").exists()
    assert not second.parent.exists()
    assert Path(resumed.publish(weights, 3)) == first
    resumed.close()
    assert not list((tmp_path / "w").iterdir())


def test_environments_of_other_processes_are_not_for_reward_functions():
    key = "environment_workers"
    overrides = ["rollout.environment=mine.py:Game", f"rollout.{key}=2"]
    config = load_config(None, overrides, environ={}).config
    loaded = SimpleNamespace(environments="those of mine.py:Game")
    assert keeping_environments(config, loaded, SimpleNamespace(asks_for_environments=False)) is loaded
    with pytest.raises(ValueError, match=rf"rollout\.{key} must be 0 .* `environments` .* got 2; set 0, or"):
        keeping_environments(config, loaded, SimpleNamespace(asks_for_environments=True))


def _late_lines_first(function):
    """Code of `function` whose lines stand in another order, each still after those whose names it uses."""
    tree = ast.parse(inspect.getsource(function))
    *lines, end = tree.body[0].body

    def names(line, kind):
        return {
            node.id for node in ast.walk(line) if isinstance(node, ast.Name) and isinstance(node.ctx, kind)
        }

    order = []
    while lines:
        made = [names(line, ast.Store) for line in lines]
        free = [
            at
            for at, line in enumerate(lines)
            if not names(line, ast.Load) & set().union(*made[:at], *made[at + 1 :])
        ]
        order.append(lines.pop(free[-1]))
    tree.body[0].body = [*order, end]
    return ast.unparse(tree)


@pytest.mark.usefixtures("narrow_model")
def test_the_order_of_lines_that_use_nothing_of_each_other_has_no_meaning(tmp_path, monkeypatch):
    """A part that changes another, or counts on one that it does not name, would fail or plan otherwise."""
    resolved = small_run(tmp_path, "a", "advantage.estimator=gae", "data.eval=builtin:arithmetic-heldout")
    code, own = _late_lines_first(build.rollout_run), dict(vars(build))
    assert code.index("Reference(") < code.index("StopWhen(")
    exec(compile(code, "reordered", "exec"), own)
    expected = dry_run(resolved)
    monkeypatch.setattr(build, "rollout_run", own["rollout_run"])
    assert dry_run(resolved) == expected
