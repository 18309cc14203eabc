"""All metrics that a run logs, with unit, reduction and meaning.

The stages produce metrics under these names, and `report.writer` writes them. Tests check that every logged
metric is listed here. `scripts/document.py` generates docs/metrics.md from this catalogue.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple


class MetricDoc(NamedTuple):
    """Documentation of a metric. `reduction`: how its values within a step are combined into one number."""

    unit: str
    reduction: str
    meaning: str


_STATS = {"mean": "Mean", "std": "Standard deviation", "min": "Minimum", "max": "Maximum"}

# name | unit | reduction | meaning, which may stand in indented lines below. `name/*` is a metric for each of
# several reductions, whose meaning begins with the reduction's name: `Mean of a sequence's advantage.`
_TABLE = """
loss | nats | mean |
    Complete loss: policy loss, KL and entropy terms, and the divergence from a teacher (`distill.loss`),
    weighted by `update.loss_aggregation`.
update/policy_loss | nats | mean | Policy loss without KL and entropy terms, mean over tokens.
update/kl | nats | mean | KL to the frozen reference, mean over tokens; logged if `update.kl_coef` is above 0.
update/sampler_kl | nats | mean |
    Half the squared difference of a token's log-probabilities by policy and sampler (k2), mean over tokens;
    logged if `update.sampler_kl_coef` is above 0, and with `dro`.
update/binary_kl | nats | mean |
    KL of the sampler's distribution to the policy's, of the sampled token against all others, mean over
    tokens; logged with `dppo_kl`, which bounds it.
update/entropy | nats | mean | Entropy of the policy at the sampling temperature, mean over tokens.
update/ratio_mean | 1 | mean | Probability ratio of the current to the old policy, mean over tokens.
update/ratio_max | 1 | max | Maximum of the probability ratio over tokens.
update/clip_fraction | fraction | mean |
    Fraction of tokens whose ratio was clipped, in any of the following three ways.
update/clip_low_fraction | fraction | mean |
    Fraction of tokens clipped at the lower bound of the ratio: with `ppo_clip` and `clip_cov`,
    1 - `update.clip_low`.
update/clip_high_fraction | fraction | mean |
    Fraction of tokens clipped at the upper bound of the ratio: with `ppo_clip` and `clip_cov`,
    1 + `update.clip_high`.
update/clip_dual_fraction | fraction | mean | Fraction of tokens whose loss was bounded by `update.dual_clip`.
update/high_covariance_fraction | fraction | mean |
    Fraction of tokens that `clip_cov` or `kl_cov` chose by the covariance of their log-probability and
    advantage.
moe/load_max | 1 | max |
    Share of the tokens that the busiest expert has, times the number of experts, in the layer where that is
    most: 1 is an even load. Of models with experts, as are all `moe/` metrics; over all tokens of the
    training step's sequences but the last of each, as the update computes them.
moe/entropy | nats | mean | Entropy of the routers' softmax over experts, mean over tokens and layers.
moe/dead_experts | experts | mean | Experts that no token of the training step has, summed over layers.
moe/replay_changed | fraction | mean |
    Fraction of choices, one for each token and layer, in which the trainer's router would have chosen other
    experts than those the sampler recorded, which are taken (`rollout.record_routes`); of the first optimizer
    step, before which the weights are those that sampled, unless batches are sampled ahead
    (`rollout.max_staleness`): then older weights chose. A value far above what these explain: the routes are
    those of other weights or other tokens.
update/router_aux_loss | 1 | mean | Auxiliary loss of the routers' loads, times `update.router_aux_coef`.
update/grad_norm | 1 | mean | Global norm of the gradient before clipping, mean over optimizer steps.
update/learning_rate | 1 | last | Learning rate of the last optimizer step, applied or not.
update/optimizer_steps | steps | sum | Optimizer steps applied in this training step.
update/bad_steps | steps | sum | Optimizer steps not applied because loss or gradient was not finite.
update/skipped_steps | steps | sum |
    Optimizer steps skipped because every advantage that is trained on was 0, without a KL or entropy term or
    a teacher.
update/masked_sequences | sequences | sum |
    Truncated completions left out of the loss (`update.mask_truncated`).
update/behaviour_weight_mean | 1 | mean |
    Weight of a token's policy loss by `update.correction`, mean over tokens.
update/corrected_fraction | fraction | mean |
    Fraction of tokens whose weight `update.correction` bounded: truncated at the cap, or masked.
update/behaviour_kl | nats | mean |
    KL of the sampler's distribution to the policy at the start of the training step (k3), mean over tokens;
    logged with `update.correction`.
update/behaviour_weight_max | 1 | max |
    Largest of these weights; logged with `update.correction_level: sequence` or `update.reject`.
update/effective_sample_fraction | fraction | mean |
    Effective sample size of these weights, (Σ w)² / Σ w², as a fraction of the tokens; logged with the same.
update/rejected_fraction/<rule> | fraction | mean |
    Fraction of tokens in sequences that this rule of `update.reject` gives the weight 0.
update/dropped_fraction | fraction | mean |
    Fraction of tokens that `update.reject` leaves out (`update.rejected: drop`).
update/masked_groups | groups | sum |
    Groups in which every advantage is 0, left out of the loss (`update.mask_zero_signal`).
distill/kl | nats | mean |
    Sampler's log-probability of a token minus the teacher's, mean over the tokens that have a teacher: an
    estimate of KL(policy || teacher). Neither this nor the next two with a `distill.loss` over all words,
    which needs no log-probabilities of tokens: `distill/loss` and `eval/teacher_kl` say how far they are.
distill/kl/<source> | nats | mean |
    The same over the rows with this value of the column `data_source`, where a batch has 2 to 16 of them.
distill/teacher_logprob | nats | mean | The teacher's log-probability of a token, mean over the same tokens.
distill/clipped_fraction | fraction | mean |
    Fraction of tokens whose difference of log-probabilities was bounded by `distill.clip`, of those that
    have a teacher.
distill/loss | nats | mean |
    Divergence of the policy from the teacher over the vocabulary (`distill.loss`), mean over the tokens that
    have a teacher.
distill/topk_mass | fraction | mean |
    The teacher's probability of its `distill.top_k` likeliest words (with a server, of the sampled one too),
    mean over the tokens that have a teacher.
distill/topk_mass_policy | fraction | mean |
    The policy's probability of the same words, mean over the same tokens.
distill/outside_mass | fraction | mean |
    The teacher's probability of words that the policy does not have, where its vocabulary is larger, mean
    over the tokens that have a teacher; losses over the vocabulary are about the words that both have.
distill/no_teacher | sequences | sum |
    Sequences without a teacher: of a data source for which `distill.teacher` names none, or longer than
    its positions, `distill.max_tokens_per_device` or what its server reads.
update/compilations | programs | sum |
    Programs compiled or read from the compilation cache in the update; 0 once all shapes occurred. With
    `rollout.max_staleness` above 0, those of the rollout's thread count too.
critic/loss | reward^2 | mean | Value loss of the critic, weighted by `update.loss_aggregation`.
critic/clip_fraction | fraction | mean |
    Fraction of tokens whose clipped value had the larger loss (`critic.clip_value`).
critic/value_mean | reward | mean | Value of a token in the critic's optimizer steps.
critic/return_mean | reward | mean | Return of a token, which the value should predict.
critic/explained_variance | 1 | mean |
    1 - Var(return - value) / Var(return) over the tokens of the batch, before the critic's optimizer steps:
    1 for a perfect critic, 0 for a constant one; left out if all returns are equal.
critic/grad_norm | 1 | mean | Global norm of the critic's gradient before clipping, mean over optimizer steps.
critic/learning_rate | 1 | last | Learning rate of the critic's last optimizer step, applied or not.
critic/optimizer_steps | steps | sum | Optimizer steps of the critic applied in this training step.
critic/bad_steps | steps | sum |
    Optimizer steps of the critic not applied because loss or gradient was not finite.
critic/micro_batches | micro-batches | sum | Micro-batches of the critic that each data shard computed.
critic/padding_fraction | fraction | mean |
    Fraction of the tokens computed by the critic's optimizer steps that is padding.
vision/pictures | pictures | sum |
    Distinct pictures of the training step, those of evaluations since the one before among them. Of models
    that see pictures, as are all `vision/` metrics; left out in a step without any.
vision/tower_pictures | pictures | sum |
    Pictures that went through the tower, as often as they did. With `model.vision: frozen` each picture once,
    as long as `model.vision_cache_bytes` holds its features; with `all` once for each version of the weights
    that sampled, and once for each micro-batch that has the picture; in the first step also for those of
    `vision/blind_gap`, without the grey ones.
vision/patches | patches | sum | Patches that the tower computed, with padding.
vision/padding_fraction | fraction | mean | Fraction of these patches that is padding.
vision/store_bytes | bytes | max |
    Host memory of what is kept of pictures: features, states or pixels (`model.vision`).
vision/blind_gap | nats | mean |
    Absolute difference of the log-probabilities of a few sequences with their pictures and with grey in their
    place, mean over completion tokens, in the first training step if it has pictures. Below 1e-6 a warning
    says that the model does not see.
batch/micro_batches | micro-batches | sum |
    Micro-batches that each data shard computed, over all optimizer steps.
batch/tokens | tokens | sum |
    Prompt and completion tokens of the sequences of all optimizer steps, without padding.
batch/padding_fraction | fraction | mean | Fraction of the computed tokens that is padding.
batch/shared_fraction | fraction | mean |
    Fraction of `batch/tokens` not computed, because prompts and common prefixes are shared.
batch/imbalance | 1 | max |
    Cost of the most expensive data shard of a micro-batch, divided by the mean cost of its shards.
global_seqlen/min | tokens | min |
    Tokens of the smallest data shard in an optimizer step, if sequences were assigned to shards in their
    order.
global_seqlen/max | tokens | max |
    Tokens of the largest data shard in an optimizer step, if sequences were assigned to shards in their
    order.
global_seqlen/mean | tokens | mean |
    Tokens of a data shard in an optimizer step, mean over shards; shared tokens counted for each sequence.
global_seqlen/minmax_diff | tokens | max |
    Difference between the largest and the smallest data shard in an optimizer step, if sequences were
    assigned to shards in their order.
global_seqlen/balanced_min | tokens | min |
    Tokens of the smallest data shard in an optimizer step, after balancing; shared tokens counted once.
global_seqlen/balanced_max | tokens | max |
    Tokens of the largest data shard in an optimizer step, after balancing; shared tokens counted once.
reward/* | reward | mean std min max |
    a sequence's total reward; sequences on which all functions abstained are left out.
reward/<name>/* | reward | mean std min max |
    a sequence's unweighted value of this reward function, without abstentions.
reward/greedy/mean | reward | mean | Mean reward of the greedy completions (`rollout.greedy_baseline`).
reward/kl | nats | mean |
    KL to the frozen reference per token (k1), mean over a sequence's tokens, then over sequences; logged if
    `reward.kl_coef` is above 0.
reward/kl_coef | 1 | mean | Coefficient of the KL in the reward.
reward/kl_penalty | reward | mean | Reward subtracted from a sequence for its KL.
reward/stop_penalty | reward | mean |
    Reward that `reward.truncated_factor` or `reward.truncated_reward` takes from a sequence, mean over
    sequences with a reward, 0 for those that were not cut; below 0 where more is given than taken.
reward/<name>/errors | sequences | sum |
    Sequences on which this reward function failed, each scored -1; of a reward model: sequences whose score
    is not finite, which get none.
reward/<name>/errors/timeout | sequences | sum |
    Sequences on which this reward function took longer than `reward.timeout_s`; part of `errors`.
reward/<name>/errors/crash | sequences | sum |
    Sequences on which a signal ended the process of this reward function, as after a segmentation fault; part
    of `errors`.
reward/<name>/errors/memory | sequences | sum |
    Sequences on which this reward function exceeded `reward.memory_mb`; part of `errors`.
reward/<name>/errors/exit | sequences | sum |
    Sequences on which this reward function called `sys.exit` or `os._exit`; part of `errors`.
reward/<name>/errors/error | sequences | sum |
    Sequences on which this reward function raised another exception or returned a value that is not finite;
    part of `errors`.
reward/<name>/seconds | s | sum |
    Seconds that this reward function or reward model took for the completions of the step.
reward/<name>/abstained | sequences | sum |
    Sequences on which this reward function abstained (returned None); of a reward model: sequences without a
    score.
reward/<name>/unlogged | values | sum |
    Values that this reward function logs and that are in no metric and no sample: no finite number, a name
    that a metric cannot have, or not one for each sample.
reward/<name>/too_long | sequences | sum |
    Sequences without a score of this reward model, because they are longer than its positions or
    `reward.model_max_tokens_per_device`.
reward/<name>/tokens | tokens | sum |
    Tokens of the sequences that this reward model scored, by its own tokenizer.
reward/judge/requests | requests | sum |
    Requests to the judge (`reward.judge`) in this step, further attempts included; on this run's engine:
    judgements that were sampled.
reward/judge/cached | judgements | sum | Judgements that were there already, of this run or a shared folder.
reward/judge/failed | judgements | sum |
    Judgements that failed; a sequence without any judgement has no reward of the judge and is in `errors`.
reward/judge/failed/timeout | judgements | sum | Of these, those whose last attempt took too long.
reward/judge/failed/lost | judgements | sum |
    Of these, those that the server did not answer, or not asked because it failed many times in a row.
reward/judge/failed/refused | judgements | sum | Of these, those that the server or its model refused.
reward/judge/failed/unreadable | judgements | sum | Of these, answers without a score in the scale.
reward/judge/failed/too_long | judgements | sum | Of these, questions without room in the judge's positions.
reward/judge/failed/no_question | judgements | sum |
    Of these, those of rows in which a column that the question names is null, or with pictures.
reward/judge/failed/budget | judgements | sum |
    Of these, those for which nothing was left of `reward.judge.budget`.
reward/judge/retries | requests | sum | Further attempts at a judgement.
reward/judge/tokens_in | tokens | sum |
    Tokens of the requests, as the server counts them; where it does not, estimated at three characters each.
reward/judge/tokens_out | tokens | sum | Tokens of the judge's answers.
reward/judge/damaged | judgements | sum |
    Judgements in the cache that were damaged, and were asked for again.
reward/<name>/<key> | 1 | mean |
    What this reward function logs with `log_metric`, or in verl's form beside `score`; mean over values.
source/<source>/reward | reward | mean |
    Mean total reward of the samples of prompts from this data set, where `data.train` has several: the file's
    name without its ending, or the data set's name. Samples on which all functions abstained are left out.
source/<source>/reward/<name> | reward | mean |
    Mean unweighted value of this reward function on these samples, without abstentions; of `correct`, the
    fraction of right answers.
source/<source>/completion_length | tokens | mean | Mean length of the completions of these samples.
source/<source>/samples | samples | sum | Number of these samples in the training step.
async/staleness_mean | optimizer steps | mean |
    Age of the weights that sampled a token at the start of the training step, mean over tokens.
async/staleness_max | optimizer steps | max | Largest age of these weights over tokens.
async/versions_per_sequence_max | versions | max |
    Largest number of versions of the weights that sampled one sequence.
fleet/alive | workers | mean | Rollout workers alive when a batch was complete.
fleet/restarts | workers | sum | Rollout workers that were lost and started again.
fleet/retried_groups | groups | sum |
    Groups that were given to a worker again, because it failed on them or was lost.
fleet/stale_groups | groups | sum | Groups that were refused: other weights sampled them than those asked for.
fleet/busy_fraction | fraction | mean |
    Fraction of the rollout workers' time, since the last batch, in which they had groups.
time/weights_gather_s | s | mean |
    Seconds for gathering the weights on the main host and publishing them to rollout workers.
time/weights_load_s | s | max | Longest time that a rollout worker took to load them.
advantage/* | 1 | mean std min max | a sequence's advantage.
advantage/zero_signal_fraction | fraction | mean |
    Fraction of groups whose advantages are all zero; nothing is learned from these groups.
length/prompt/* | tokens | mean max | a sequence's prompt length.
length/completion/* | tokens | mean max | a sequence's completion length, stop token included.
length/total/* | tokens | mean max | a sequence's total length of prompt and completion.
length/environment/* | tokens | mean max |
    what environment and chat template added to an episode, which is not trained on.
episode/turns/* | turns | mean max | the policy's turns in an episode.
episode/reward/mean | reward | mean |
    Mean of the environment's rewards in an episode: of its turns and at its end.
episode/<environment>/turns/* | turns | mean max | the policy's turns in an episode of this environment.
episode/<environment>/reward/mean | reward | mean |
    Mean of this environment's rewards in an episode, where a column chooses among several.
episode/errors | episodes | sum | Episodes that an error of their environment ended (`finish_reason` `error`).
episode/timeouts | episodes | sum |
    Episodes whose environment took longer than `rollout.environment_timeout_s`.
episode/tool_calls | calls | sum | Calls of tools in the completions.
episode/malformed_calls | calls | sum | Of these, calls that could not be made; the policy read why.
episode/tool_errors | calls | sum | Of these, calls of tools that raised an exception; the policy read it.
agent/turns/* | turns | mean max | the answers of the policy in an episode of an agent (`rollout.agent`).
agent/sequences/* | sequences | mean max |
    the sequences of an episode: the paths of its tree of turns, each of which is a row of the batch.
agent/reward/mean | reward | mean | Mean of what agents returned as their reward.
agent/reward_of/<role> | reward | mean | Mean of the rewards of a role of the agents (`client.role`).
agent/untrained_roles | roles | sum |
    Roles that asked, and that the rewards which the agent returned leave out.
agent/context_fraction | fraction | mean |
    Fraction of the sequences' tokens that are answers trained in another row of their episode.
agent/recomputed_fraction | fraction | mean |
    Fraction of the tokens of requests' contexts that had been computed for the answer they continue, and were
    computed again (`rollout.prefix_share`). A server (`rollout.servers`) that does not say what it had kept
    counts as if it kept nothing.
agent/roots | turns | sum |
    Turns that continue no answer: the first of an episode, and those after an edit of its history.
agent/branches | turns | sum | Further turns that continue the same answer.
agent/abandoned_turns | turns | sum |
    Answers that are not trained: the client left before they came, or they were not sampled to their end.
agent/replayed | requests | sum |
    Requests that a client repeated after its connection broke, and which got the same answer.
agent/overridden_fields | fields | sum |
    Sampling parameters that requests gave; those of the run were used.
agent/refused_requests | requests | sum |
    Requests beyond a limit of the episode (`rollout.max_turns`, `rollout.max_new_tokens`, its length).
agent/untrained_requests | requests | sum |
    Requests of episodes whose answers are not trained: by `untrained_base_url`, or by the name of a model
    that ends in `:untrained`.
agent/tool_calls | calls | sum | Calls of tools in the answers.
agent/malformed_calls | calls | sum | Calls that could not be read, and stayed text.
agent/errors | episodes | sum | Episodes that an error of their agent ended, or the end of its process.
agent/timeouts | episodes | sum | Episodes whose agent took longer than `rollout.agent_timeout_s`.
agent/retried_episodes | episodes | sum |
    Episodes that were played again from their beginning, because their process died.
agent/own/<name> | 1 | mean | Mean of a metric that agents returned.
time/agent_tail_s | s | sum |
    Seconds from the end of nine tenths of the episodes of the batch to that of the last.
dynamic_sampling/rounds | rounds | sum |
    Rounds of drawing prompts in a training step (`rollout.dynamic_sampling_rounds`).
dynamic_sampling/drawn_groups | groups | sum |
    Groups that were drawn in a training step (`rollout.dynamic_sampling_rounds`).
dynamic_sampling/dropped_groups | groups | sum |
    Groups without signal that were drawn and not trained on (`rollout.dynamic_sampling_rounds`).
dynamic_sampling/returned_groups | groups | sum |
    Groups beyond the last one used, whose prompts the next training step draws again
    (`rollout.dynamic_sampling_rounds`).
dynamic_sampling/filled_groups | groups | sum |
    Groups without signal that are trained on because the rounds did not suffice
    (`rollout.dynamic_sampling_rounds`).
curriculum/below | prompts | sum |
    Training prompts whose running pass rate is below the band (`data.curriculum`), after the training step.
curriculum/within | prompts | sum | Training prompts whose running pass rate is in the band.
curriculum/above | prompts | sum | Training prompts whose running pass rate is above the band.
curriculum/unseen | prompts | sum | Training prompts without a rate, because they have not been drawn.
curriculum/rate | reward | mean | Running pass rate, mean over the prompts that have one.
rollout/truncated_fraction | fraction | mean |
    Fraction of completions cut at `rollout.max_new_tokens`, and of episodes that ended because a limit on
    tokens left no room.
rollout/logprob_diff_mean | nats | mean |
    Absolute difference between the sampler's and the trainer's log-probability of a token, mean over the
    tokens of the first optimizer step.
rollout/logprob_diff_max | nats | max | Maximum of this absolute difference over the same tokens.
rollout/tokens_per_s | tokens/s | mean | Completion tokens per second of generation.
rollout/prefill_s | s | sum | Seconds of generation spent in prefill (computing prompts).
rollout/prefill_tokens | tokens | sum |
    Prompt tokens computed: each prompt once per group, a common prefix once per packed row. In episodes, also
    the tokens before a turn that are not in the cache.
rollout/decode_s | s | sum | Seconds of generation spent in decoding.
rollout/slot_utilisation | fraction | mean |
    Slots times decode steps that gave a token of a completion, divided by decode steps times the largest
    number of slots.
rollout/wasted_decode_fraction | fraction | mean |
    Fraction of slots times decode steps that gave no token of a completion.
rollout/tokens_per_decode_step | tokens | mean |
    Tokens of completions that a decode step gave a sequence (`rollout.speculate`); without drafts it is 1.
rollout/draft_accept_fraction | fraction | mean |
    Fraction of the drafts that became tokens of a completion (`rollout.speculate`).
rollout/preempted | sequences | sum |
    How often a sequence lost its slot because the KV cache had no room for all; it goes on later.
rollout/recomputed_tokens | tokens | sum |
    Tokens of prompts and completions computed once more, of sequences that lost their slots.
rollout/prefix_hit_fraction | fraction | mean |
    Fraction of the tokens of requests' contexts that were not computed, because a kept context had them
    (`rollout.prefix_share`). What is new to a request is in no context that was kept.
rollout/prefix_evicted_tokens | tokens | sum |
    Tokens of kept contexts that were given up for others, while they could still be asked for.
rollout/compilations | programs | sum |
    Programs compiled or read from the compilation cache in the rollout; 0 once all shapes occurred.
data/skipped_prompts | prompts | sum |
    Training prompts skipped because they are longer than `data.max_prompt_length`.
data/truncated_prompts | prompts | sum | Training prompts cut to their last `data.max_prompt_length` tokens.
data/filtered_prompts | prompts | sum |
    Training prompts left out by `data.min_pass_rate` and `data.max_pass_rate`.
time/rollout_s | s | sum | Seconds of the rollout stage.
time/rollout_sync_s | s | sum |
    Seconds of the rollout stage spent copying the new weights to the rollout mesh.
time/rollout_generate_s | s | sum | Seconds of the rollout stage spent in prefill and decoding.
time/rollout_flush_s | s | sum | Seconds of the rollout stage spent converting tokens to text and to arrays.
time/environment_wait_s | s | sum |
    Seconds of the rollout stage in which nothing was decoded, because answers of environments were waited
    for.
time/reward_s | s | sum | Seconds of the reward stage.
time/copy_weights_s | s | sum | Seconds spent copying weights for the batches to be sampled ahead.
time/wait_rollout_s | s | sum | Seconds that training waited for the batch (`rollout.max_staleness` above 0).
time/lead_s | s | sum |
    Seconds from the beginning of the batch's rollout until training took it (`rollout.max_staleness` above
    0).
time/wait_weights_s | s | sum |
    Seconds that the rollout waited for weights before it sampled the batch (`rollout.max_staleness` above 0).
time/reward_models_s | s | sum | Seconds of the reward stage spent computing the scores of reward models.
time/token_scores_s | s | sum |
    Seconds spent on what advantages need of the models: values of the critic, and log-probabilities for KL in
    the reward.
time/teacher_s | s | sum | Seconds of the teacher's passes over the batch (`distill.teacher`).
time/advantage_s | s | sum | Seconds of the advantage stage.
time/critic_s | s | sum | Seconds of the update stage spent on the critic's optimizer steps.
time/shard_s | s | sum | Seconds of the update stage spent splitting mini-batches and moving them to devices.
time/vision_s | s | sum |
    Seconds spent decoding pictures and computing their features for sampling and micro-batches; a tower that
    runs within the loss is part of `time/update_s`.
time/update_s | s | sum | Seconds of the update stage.
time/update_logprobs_s | s | sum | Seconds of the update stage spent on old and reference log-probabilities.
time/eval_s | s | sum | Seconds of an evaluation.
time/checkpoint_s | s | sum | Seconds to start a checkpoint: waiting for the previous one, copying arrays.
time/step_s | s | sum |
    Seconds of the training step: rollout, reward, advantage and update; on given data, batch and update.
time/compile_s | s | sum |
    Seconds of the training step spent compiling programs, or reading them from the compilation cache.
time/sft_s | s | sum | Seconds of the supervised warm start.
time/<stage>_s_mean10 | s | mean | Mean of `time/<stage>_s` over the last 10 steps in which the stage ran.
memory/peak_gib | GiB | max |
    Most memory in use since the start, on the device of the main process that used the most; on a CPU, the
    largest resident set of the main process, without workers' processes.
throughput/tokens_per_s | tokens/s | mean |
    Prompt and completion tokens of the batch that is trained on per second of the training step.
throughput/update_tokens_per_s | tokens/s | mean |
    Prompt and completion tokens, times `update.epochs`, per second of the update.
eval/accuracy_lenient | fraction | mean |
    Fraction of greedy completions that are right by `eval.accuracy`. Completions that it cannot judge are
    left out of both accuracies.
eval/accuracy_strict | fraction | mean |
    Fraction of greedy completions that are right and in the `<think>/<answer>` format; logged if the reward
    function `format` or `tag_count` asks for it.
eval/accuracy_errors | completions | sum |
    Completions on which the function that decides accuracy failed; not judged.
eval/reward | reward | mean | Mean total reward of greedy completions.
eval/reward/<name>/errors | completions | sum | Greedy completions on which this reward function failed.
eval/reward/<name>/errors/<kind> | completions | sum |
    Greedy completions on which this reward function failed in this way.
eval/reward/<name>/abstained | completions | sum | Greedy completions on which this reward function abstained.
eval/reward/<name>/unlogged | values | sum | Values that this reward function logs and that are nowhere.
eval/reward/judge/<count> | 1 | sum |
    Of the judge on greedy completions: requests, tokens and so on, as `reward/judge/…`.
eval/reward/<name>/<key> | 1 | mean | What this reward function logs of greedy completions; mean over values.
eval/reward/<name> | reward | mean | Mean unweighted value of this reward function, without abstentions.
eval/teacher_kl | nats | mean |
    Log-probability of a token of the greedy completions by the policy, at `rollout.temperature`, minus the
    teacher's, mean over their tokens.
eval/completion_length | tokens | mean | Mean length of greedy completions.
eval/truncated_fraction | fraction | mean | Fraction of greedy completions cut at the maximum length.
eval/mean_at_n | fraction | mean | Fraction of right answers among `eval.n` sampled completions per prompt.
eval/pass_at_n | fraction | mean |
    Fraction of prompts with at least one right answer among `eval.n` sampled completions.
eval/num_prompts | prompts | sum | Number of prompts evaluated.
eval/skipped_prompts | prompts | sum |
    Evaluation prompts skipped because they are longer than `data.max_prompt_length`.
eval/truncated_prompts | prompts | sum | Evaluation prompts cut to their last `data.max_prompt_length` tokens.
eval/loss | nats | mean |
    Loss of the rows of `sft.eval`, `dpo.eval` or `rm.eval`, all of them, without gradient; of `sft.eval` the
    mean over trained tokens.
eval/loss/<source> | nats | mean | The same over the rows of this data set, where there are 2 to 16 of them.
eval/perplexity | 1 | mean | exp of `eval/loss` of `quatrain sft`.
eval/accuracy | fraction | mean | As `dpo/accuracy` or `rm/accuracy`, of these rows.
eval/accuracy/<source> | fraction | mean |
    The same over the rows of this data set, where there are 2 to 16 of them.
eval/margin | 1 | mean | As `dpo/margin` or `rm/margin`, of these rows.
eval/reward_chosen | 1 | mean | As `dpo/reward_chosen`, of these rows.
eval/reward_rejected | 1 | mean | As `dpo/reward_rejected`, of these rows.
eval/logprob_chosen | nats | mean | As `dpo/logprob_chosen`, of these rows.
eval/logprob_rejected | nats | mean | As `dpo/logprob_rejected`, of these rows.
eval/kl | nats | mean |
    As `dpo/kl`, of these rows: of the parts in which they are evaluated, a batch or 64 answers, by which
    `eval/loss` judges theirs.
eval/kl_chosen | nats | mean | As `dpo/kl_chosen`, of these rows.
eval/reward_mean | 1 | mean | As `rm/reward_mean`, of these rows.
eval/reward_min | 1 | min | As `rm/reward_min`, of these rows.
eval/reward_max | 1 | max | As `rm/reward_max`, of these rows.
eval/reward_std | 1 | mean |
    As `rm/reward_std`, of these rows: mean over the parts in which they are evaluated, a batch or 64 pairs.
sft/loss | nats | mean |
    Negative log-likelihood, mean over the trained tokens of the batch; of a warm start, that of its last
    step.
sft/loss/<source> | nats | mean | The same over the rows of this data set, where there are 2 to 16 of them.
sft/perplexity | 1 | mean | exp of `sft/loss`.
sft/entropy | nats | mean | Entropy of the model, mean over the same tokens.
sft/tokens | tokens | sum | Trained tokens of the batch.
dpo/loss | nats | mean | Loss of preferences (`dpo.loss`), mean over pairs, or with `kto` over answers.
dpo/loss/<source> | nats | mean | The same over the rows of this data set, where there are 2 to 16 of them.
dpo/accuracy | fraction | mean |
    Pairs whose chosen answer has the larger reward, before the step; ties count half.
dpo/accuracy/<source> | fraction | mean |
    The same over the rows of this data set, where there are 2 to 16 of them.
dpo/margin | 1 | mean | Reward of the chosen answer minus that of the rejected one.
dpo/reward_chosen | 1 | mean |
    Reward of the chosen answer: `dpo.beta` times its log-probability under the policy minus that under the
    reference; for losses without a reference, `dpo.beta` times its mean log-probability. With `kto`, of the
    answers labelled true.
dpo/reward_rejected | 1 | mean | The same of the rejected answer, or of those labelled false.
dpo/logprob_chosen | nats | mean | Log-probability of the chosen answer, the sum over its tokens.
dpo/logprob_rejected | nats | mean | The same of the rejected answer.
dpo/kl_chosen | nats | mean |
    Log-probability of a token of the chosen answers under the policy minus that under the reference.
dpo/kl | nats | mean |
    Estimate of the KL of the policy to the reference, at least 0, by which `kto` judges answers.
rm/loss | nats | mean | Loss of the reward model (`rm.loss`), mean over pairs.
rm/loss/<source> | nats | mean | The same over the rows of this data set, where there are 2 to 16 of them.
rm/accuracy | fraction | mean |
    Pairs whose chosen answer has the larger score, before the step; ties count half.
rm/accuracy/<source> | fraction | mean |
    The same over the rows of this data set, where there are 2 to 16 of them.
rm/margin | 1 | mean | Score of the chosen answer minus that of the rejected one.
rm/reward_mean | 1 | mean | Mean score of an answer.
rm/reward_min | 1 | min | Smallest score of an answer.
rm/reward_max | 1 | max | Largest score of an answer.
rm/reward_std | 1 | mean | Standard deviation of the scores of the batch.
data/epoch | epochs | mean | How often the rows have been trained on, counted in rows.
data/skipped_rows | rows | sum | Rows of given data left out, because they are too long (`on_long: skip`).
data/truncated_rows | rows | sum | Rows of given data whose end was cut off (`on_long: truncate`).
data/filtered_rows | rows | sum | Rows of given data left out by a flag such as `weight: 0`.
time/data_s | s | sum | Seconds spent making the batch of rows of given data.
"""


def _entries() -> Iterator[tuple[str, MetricDoc]]:
    for line in re.sub(r"\n +", " ", _TABLE.strip()).splitlines():
        name, unit, reductions, meaning = line.split(" | ", 3)
        if name.endswith("/*"):
            for stat in reductions.split():
                yield f"{name[:-1]}{stat}", MetricDoc(unit, stat, f"{_STATS[stat]} of {meaning}")
        else:
            yield name, MetricDoc(unit, reductions, meaning)


CATALOGUE = dict(_entries())
"""Name -> meaning. `<name>`, `<environment>`, `<source>`, `<rule>` and `<stage>` stand for any reward
function, environment, data source, rule and timed stage."""


def unknown_metrics(names: Iterable[str]) -> list[str]:
    """The names that are not in the catalogue, sorted.

    Metrics of an evaluation may have the name of their set after `eval/`, then `final/` where they are of all
    prompts of the evaluation after training: `eval/gsm8k/final/reward`. The metrics of episodes are listed
    once: `eval/episode/turns/mean` is looked up as `episode/turns/mean`.
    """
    return sorted(name for name in set(names) if pattern_of(name) is None)


@cache
def pattern_of(name: str) -> str | None:
    """The key of the catalogue that lists the metric `name`; None if it is not listed."""
    found = (known for each in (name, _without_set(name)) for known in CATALOGUE if _matches(known, each))
    return name if name in CATALOGUE else next(found, None)


def _without_set(name: str) -> str:
    plain = re.sub(r"^eval/(final/|(?!reward/|episode/|agent/)[\w.-]+/(final/)?)", "eval/", name)
    return plain.removeprefix("eval/") if plain.startswith(("eval/episode/", "eval/agent/")) else plain


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.sub("<[a-z]+>", ".+", re.escape(pattern)), name) is not None
