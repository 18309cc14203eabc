# Images of quatrain for CPUs, NVIDIA GPUs and TPUs; EXTRAS are the extras of pyproject.toml to install.
#   docker build -t quatrain .
#   docker build -t quatrain:cuda --build-arg EXTRAS=cuda,gpu,hub .
#   docker build -t quatrain:tpu --build-arg EXTRAS=tpu,hub .
#   docker run --rm -v "$PWD/runs:/quatrain/runs" quatrain train
#   docker run --rm --gpus all -v "$PWD/runs:/quatrain/runs" quatrain:cuda train configs/gsm8k_qwen25_0p5b.yaml
# CUDA comes with jax from PyPI. The host needs NVIDIA's driver and the NVIDIA Container Toolkit.
FROM python:3.12-slim
ARG EXTRAS=hub
WORKDIR /quatrain
COPY . .
RUN pip install --no-cache-dir -c constraints.txt -e ".[${EXTRAS}]"
ENTRYPOINT ["quatrain"]
CMD ["train"]
