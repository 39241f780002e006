# NOT RUN HERE: written to the same steps as `make install`, but nobody has built this image as part of the tests.
FROM python:3.11-slim

# bubblewrap confines queries and functions; without it queries run with fewer walls and functions are refused.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/tracelake
COPY requirements.txt .
RUN pip install --no-cache-dir --require-hashes -r requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

# The home, and in it the objects, which all processes have to find under the same path.
RUN useradd --create-home --home-dir /var/lib/tracelake --uid 8600 tracelake \
    && mkdir /var/lib/tracelake/objects /addresses \
    && chown -R tracelake /var/lib/tracelake /addresses
USER tracelake
WORKDIR /var/lib/tracelake
ENTRYPOINT ["tracelake"]
