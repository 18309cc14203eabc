#!/bin/bash
set -x
MODEL=Qwen/Qwen2.5-0.5B-Instruct
NODES=${NNODES:-1}
train_files="['$HOME/gsm8k/train.parquet', '$HOME/math/train.parquet']"

python3 -m verl.trainer.main_ppo --config-name=ppo_trainer \
    algorithm.adv_estimator=gae algorithm.lam=0.95 \
    data.train_files="$train_files" \
    data.val_files=gsm8k/test.parquet \
    data.train_batch_size=256 \
    data.max_response_length=512 \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.rollout.name=vllm \
    critic.optim.lr=2e-5 \
    critic.model.path=${CRITIC:-Qwen/Qwen2.5-0.5B} \
    critic.ppo_micro_batch_size_per_gpu=8 \
    trainer.logger='["console","wandb"]' \
    +trainer.nnodes=$NODES \
    trainer.n_gpus_per_node=4 \
    trainer.total_epochs=15 $@
