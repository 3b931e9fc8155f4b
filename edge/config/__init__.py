"""Configuration from profiles, edgellm.toml, environment and flags: `load` reads it, `settle` applies it to a board."""

from edge.config.load import load as load
from edge.config.load import settle as settle
from edge.config.values import Config as Config
from edge.config.values import ModelConfig as ModelConfig
