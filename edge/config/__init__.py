"""Configuration from profiles, edgellm.toml, environment and flags; `resolve_profile` fits it to a board."""

from edge.config.load import load as load
from edge.config.load import resolve_profile as resolve_profile
from edge.config.values import Config as Config
from edge.config.values import ModelConfig as ModelConfig
