# agentrl with vLLM for NVIDIA GPUs; needs the NVIDIA Container Toolkit and a driver for CUDA 13.
#
#   docker build -t agentrl .
#   docker run --rm --gpus all --ipc host -v "$PWD:/work" agentrl train --config simpletir_7b --dry-run
#
# The -devel image contains nvcc, with which DeepSpeed compiles its optimizers when a run first needs them.
ARG BASE_IMAGE=nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
FROM ${BASE_IMAGE}
ARG EXTRAS=vllm,ray,lora,hub

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ ninja-build python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

COPY . /source
# torchvision and torchaudio come with vLLM and may not fit torch; agentrl needs neither.
RUN python3 -m venv /opt/agentrl \
    && /opt/agentrl/bin/pip install --no-cache-dir /source/sandbox "/source[${EXTRAS}]" \
    && /opt/agentrl/bin/pip uninstall --yes torchvision torchaudio torchcodec \
    && rm -r /source

ENV PATH=/opt/agentrl/bin:/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin
WORKDIR /work
ENTRYPOINT ["agentrl"]
CMD ["doctor"]
