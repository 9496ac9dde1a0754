#!/bin/bash -eu
# OSS-Fuzz sets SRC, OUT, CXX, CXXFLAGS and LIB_FUZZING_ENGINE. It was never run there; the first command runs anywhere.
python3 tools/fuzzing/compiled.py "$OUT"

# The targets in Python. torch is not needed.
pip3 install --no-deps .
pip3 install gguf hypothesis lmdb msgspec numpy obstore pydantic regex zstandard xxhash click starlette rich httpx psutil
for target in $(PYTHONPATH=. python3 -c 'from tools.fuzzing.python_targets import TARGETS; print(*TARGETS)'); do
  printf 'import sys\nfrom tools.fuzzing.atheris_worker import main\nsys.argv.insert(1, "%s")\nmain()\n' "$target" >"fuzz_$target.py"
  compile_python_fuzzer "fuzz_$target.py" --collect-submodules diskprefix --collect-data diskprefix --collect-submodules tests
done

for archive in tools/fuzzing/corpus/*_seed_corpus.zip; do
  name="$(basename "$archive")"
  # Targets in Python have their file's name there.
  if [[ -e "$OUT/${name%_seed_corpus.zip}" ]]; then cp "$archive" "$OUT/$name"; else cp "$archive" "$OUT/fuzz_$name"; fi
done
