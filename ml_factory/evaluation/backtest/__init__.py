"""Backtests: forecasts as trades after costs, without a look ahead."""

from ml_factory.evaluation.backtest.contracts import ContractSpec, contract_spec
from ml_factory.evaluation.backtest.simulation import Backtest, CostSpec, TradingRule, run

__all__ = ["Backtest", "ContractSpec", "CostSpec", "TradingRule", "contract_spec", "run"]
