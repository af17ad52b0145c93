#!/usr/bin/env bash
# Install the system packages that some tests and fields use and that are missing here (make system). Without them the
# package works: CPU compilation and torchcodec fall back with their reason, and the browser tests say what they need.
set -euo pipefail

has() { command -v "$1" >/dev/null 2>&1; }
can() { python3 -c "$1" >/dev/null 2>&1; }

wanted=()
has chromium || has chromium-browser || has google-chrome || wanted+=(chromium)
has chromedriver || wanted+=(chromium-driver)
has ffmpeg || wanted+=(ffmpeg)  # brings the shared libraries that torchcodec decodes with
has c++ || wanted+=(g++)
can 'import venv, ensurepip' || wanted+=(python3-venv)
can 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' || wanted+=(python3-dev)

if [ ${#wanted[@]} -eq 0 ]; then
  echo "system: all packages are there"
elif ! has apt-get; then
  echo "system: no apt-get here, skipped; install by other means: ${wanted[*]}"
elif [ "$(id -u)" -ne 0 ]; then
  echo "system: not root, skipped; an administrator can run: apt-get install ${wanted[*]}"
else
  echo "system: installing ${wanted[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${wanted[@]}" >/dev/null
  echo "system: done"
fi
