"""The prefix cache of one model: match → restore → capture → publish. See README.md in this folder."""
