"""A taskset for verifiers: a word is to be said, with a tool that spells it."""

import verifiers.v1 as vf


class WordData(vf.TaskData):
    word: str


class WordTask(vf.Task[WordData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def length(self, trace) -> float:
        return len(trace.last_reply or "") / 10

    @vf.metric
    async def word_length(self) -> float:
        return float(len(self.data.word))


class WordsConfig(vf.TasksetConfig):
    suffix: str = "."


class Words(vf.Taskset[WordTask, WordsConfig]):
    def load(self):
        for word in ("pen", "book", "lamp", "apple"):
            yield WordTask(
                WordData(name=word, prompt=f"Say {word}{self.config.suffix}", word=word), self.config.task
            )


__all__ = ["Words"]
