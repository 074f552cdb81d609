# docker build -t isobatch . ; docker run --rm -it --gpus all --shm-size 8g -v "$PWD:/work" isobatch auto --task causal-lm
# On machines without an NVIDIA GPU: --build-arg INDEX=https://download.pytorch.org/whl/cpu makes it 4 GB smaller.
FROM python:3.12-slim-bookworm AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm
ARG INDEX=https://pypi.org/simple
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# Of the lock only what is installed counts. A local version (2.13.0+cpu) fits a pin without one.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    --mount=type=bind,source=requirements.lock,target=/requirements.lock \
    pip install --no-cache-dir --extra-index-url "$INDEX" -c /requirements.lock "$(echo /wheels/*.whl)[all,serve]"
RUN useradd --create-home --uid 1000 isobatch && mkdir /work && chown 1000 /work
USER 1000
WORKDIR /work
ENTRYPOINT ["isobatch"]
CMD ["--help"]
