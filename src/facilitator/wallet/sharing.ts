// Which payments may share a transaction. Multicall3 passes all of the remaining gas on to each call, so a payer with code
// is sent alone: its code could burn the gas of its neighbours. And the chain must have Multicall3 where it is expected.

import type { Chain } from "../../chain/chain.ts";
import { MULTICALL3_CHECKSUMMED } from "../../chain/token.ts";
import { Fault } from "../../core/fault.ts";
import type { Log } from "../../core/log.ts";
import { StartupProblem } from "../../core/startup.ts";
import type { Hex } from "../../x402/types.ts";

const BLOCK_AGE_MS_MAX = 1000;

/** @param paymentsMax of one transaction */
export function createSharing(chain: Chain, paymentsMax: number, log: Log): (payer: Hex) => Promise<boolean> {
  let isThere = false;
  let isLogged = false;

  /** Asked until it is there: at the start no node may have answered. */
  async function hasMulticall3(): Promise<boolean> {
    if (isThere) return true;
    isThere = await chain.hasMulticall3().catch(() => false);
    if (!isThere && !isLogged) log.error("multicall3_missing", { address: MULTICALL3_CHECKSUMMED });
    isLogged = !isThere;
    return isThere;
  }

  return async (payer) => {
    if (paymentsMax <= 1 || !(await hasMulticall3())) return false;
    return !(await chain.hasCode(payer, await chain.newest(BLOCK_AGE_MS_MAX)));
  };
}

/** Where no node answers, nothing is known yet, and the payments go one by one until it is. @throws StartupProblem */
export async function requireMulticall3(chain: Chain): Promise<void> {
  const isThere = await chain.hasMulticall3().catch((error: unknown) => {
    if (error instanceof Fault && error.kind === "unavailable") return true;
    throw error;
  });
  if (!isThere)
    throw new StartupProblem(
      `TOLLGATE_BATCH must be 0, since the chain of TOLLGATE_RPC_URLS has no Multicall3 at ${MULTICALL3_CHECKSUMMED}`,
    );
}
