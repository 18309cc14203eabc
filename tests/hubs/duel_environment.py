"""An environment of three agents for verifiers: of two, the longer answer wins; a judge is not trained."""

import verifiers.v1 as vf


class DuelConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    second: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    judge: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class Duel(vf.Env[DuelConfig]):
    async def setup(self, agents):
        agents.judge.trainable = False

    async def run(self, task, agents):
        await agents.first.run(task)
        await agents.second.run(task)
        await agents.judge.run(task)

    async def finalize(self, task, episode):
        lengths = {trace.agent.name: len(trace.last_reply or "") for trace in episode.traces}
        won = (lengths["first"] > lengths["second"]) - (lengths["first"] < lengths["second"])
        for trace in episode.traces:
            sign = {"first": 1, "second": -1, "judge": 0}[trace.agent.name]
            trace.record_reward("won", float(sign * won))
            trace.record_reward("length", 0.0, weight=0.0)


__all__ = ["Duel"]
