apt-get update -qq
apt-get install -qq -y --no-install-recommends python3-venv python3-numpy >/dev/null
python3 -m venv --system-site-packages /tmp/python
/tmp/python/bin/pip install --quiet --no-index /given/*.whl
cat >/tmp/readme.py <<'P'
@BLOCK@
P
python3 --version
/tmp/python/bin/python /tmp/readme.py
