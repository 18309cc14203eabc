"""Two environments of openenv, as its users write them: one with an action, one with MCP tools.

python echo_server.py action|tools PORT
"""

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str


class Heard(Observation):
    heard: str = ""


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **more):
        self.turn = 0
        return Heard(heard=f"Say something. Seed {seed}.")

    def step(self, action, timeout_s=None, **more):
        self.turn += 1
        return Heard(heard=action.message, reward=0.25, done=self.turn == 2)

    @property
    def state(self):
        return State(step_count=self.turn)


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("tools")

        @server.tool
        def add(a: int, b: int) -> int:
            """Adds."""
            return a + b

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **more):
        return Observation()

    def _step_impl(self, action, timeout_s=None, **more):
        return Observation(metadata={"error": "no such action"})

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    kind, port = sys.argv[1:]
    if kind == "action":
        app = create_app(Echo, Say, Heard, env_name="echo", max_concurrent_envs=1)
    else:
        app = create_app(Tools, CallToolAction, CallToolObservation, env_name="tools", max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
