#!/usr/bin/env bash
# Build the images of the commit that is checked out, with labels that name it, and say how large they are.
# Options are those of `docker compose build`, for instance --no-cache or the name of one service.
set -euo pipefail
cd "$(dirname "$0")/.."
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
REVISION=$(git rev-parse HEAD)$([ -z "$(git status --porcelain)" ] || echo -dirty)
VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
CREATED=$(date --utc --date "@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)
SOURCE=${SOURCE:-$(git remote get-url origin 2>/dev/null || true)}
export SOURCE_DATE_EPOCH REVISION VERSION CREATED SOURCE
docker compose build "$@"
for service in scheduler gateway executor; do
  image=$(docker compose config --images "$service" | grep -e "-$service$" | head -n 1)
  docker image inspect "$image" --format "{{.Size}} {{.Id}} $image" 2>/dev/null |
    awk '{printf "%-24s %6.0f MB  %s\n", $3, $1 / 1e6, $2}'
done
