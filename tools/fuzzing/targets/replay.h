// Runs targets without libFuzzer: the arguments are names of targets, each with a folder behind it. TARGETS are theirs.

#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>

int main(int count, char** arguments) {
  typedef int (*Target)(const uint8_t*, size_t);
  const std::map<std::string, Target> targets = {TARGETS};
  for (int i = 1; i + 1 < count; i += 2)
    for (const auto& entry : std::filesystem::directory_iterator(arguments[i + 1])) {
      std::ifstream file(entry.path(), std::ios::binary);
      const std::vector<char> content((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
      fprintf(stderr, "%s %s\n", arguments[i], entry.path().c_str());
      targets.at(arguments[i])((const uint8_t*)content.data(), content.size());
    }
  return 0;
}
