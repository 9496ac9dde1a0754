"""The prefix cache of one model: match → restore → choose → publish. See README.md in this folder."""
