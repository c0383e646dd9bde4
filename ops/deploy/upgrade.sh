#!/bin/bash
# Replaces the containers of a service by ones of the present image, without downtime: as many new ones beside the old ones, and once
# they are healthy the old ones leave one by one, each after its drain. In the folder of docker-compose.yml, after `docker-compose build`:
#   ops/deploy/upgrade.sh node
#   ops/deploy/upgrade.sh front      the host needs a port for each of twice the front ends: PORT=50051-50054 for two
# COMPOSE_PROJECT_NAME, COMPOSE_FILE and .env mean what they mean to Compose. If new ones do not become healthy they are removed again.
set -euo pipefail
HEALTHY_S=${HEALTHY_S:-180}  # reading a large model takes longer
STOP_S=60  # as stop_grace_period

service=${1:?usage: ops/deploy/upgrade.sh node|front}
compose() { if command -v docker-compose >/dev/null; then docker-compose "$@"; else docker compose "$@"; fi; }
health() { docker inspect --format '{{.State.Health.Status}}' "$1"; }

mapfile -t old < <(compose ps -q "$service")
[ ${#old[@]} -gt 0 ] || { echo "upgrade: no container of $service is there; docker-compose up makes them" >&2; exit 1; }

remove_new() {
  echo "upgrade: $1; the new ones are removed, the old ones serve on" >&2
  [ ${#new[@]} -eq 0 ] || docker rm --force "${new[@]}" >/dev/null
  exit 1
}

started=0
compose up -d --no-deps --no-recreate --scale "$service=$((2 * ${#old[@]}))" "$service" || started=$?
mapfile -t new < <(compose ps -q "$service" | grep -vxF -f <(printf '%s\n' "${old[@]}"))
[ "$started" -eq 0 ] || remove_new "not all new containers of $service could be started"
for id in "${new[@]}"; do
  until [ "$(health "$id")" = healthy ]; do
    [ "$SECONDS" -lt "$HEALTHY_S" ] || remove_new "container $id is $(health "$id") after $HEALTHY_S s"
    sleep 0.5
  done
done
for id in "${old[@]}"; do
  docker stop -t "$STOP_S" "$id" >/dev/null
  docker rm "$id" >/dev/null
  echo "upgrade: $service ${id:0:12} has left"
done
echo "upgrade: ${#new[@]} of $service are new"
