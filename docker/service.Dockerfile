# The environment service as an image: no torch, no verl, no root. Built from the root of the repository:
#   docker build -f docker/service.Dockerfile -t agent-env-service .
# docker/README.md says how to put your own environments in.
FROM python:3.11-slim-bookworm

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /app

# What the service imports; versions, also of what these bring along, are those of the lock.
COPY requirements/cpu.txt requirements/service.in ./requirements/
RUN pip install --constraint requirements/cpu.txt --requirement requirements/service.in \
    && useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin service

COPY recipe/agent_env ./recipe/agent_env
COPY examples ./examples

# Mount or copy your own modules to /envs.
ENV PYTHONPATH=/app:/envs
USER 10001
EXPOSE 8000

# `/` answers without a token, and only while the service can answer at all.
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/', timeout=4).read()"]

# 0.0.0.0: inside a container, loopback would be seen by nobody. Which machines see it is decided by `docker run -p`.
ENTRYPOINT ["python", "-m", "recipe.agent_env.env_service", "--host", "0.0.0.0", "--port", "8000"]
CMD ["sokoban-v0=examples.sokoban.sokoban_env:SokobanEnv"]
