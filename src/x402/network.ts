// The networks on which payments are made, a row for each, with all that differs from one to the next. The configuration
// makes the one value that a process works with, and composition hands it to whatever needs it.
import { type Hex, lowerHex } from "./types.ts";

export const X402_VERSION = 1;
export const SCHEME = "exact";

interface NetworkRow {
  /** For people. */
  readonly title: string;
  readonly chainId: number;
  /** Of the token, with the checksum of EIP-55: official clients compare it as text. */
  readonly address: Hex;
  readonly tokenName: string;
  /** The hash of the token's EIP-712 domain, as its `DOMAIN_SEPARATOR()` gives it. */
  readonly domain: Hex;
  /** From a block to the next, about. */
  readonly blockSeconds: number;
  /** Blocks until an inclusion counts as final, unless the operator says otherwise, as of the last three fees. */
  readonly confirmations: number;
  /** Wei: priority fees and the whole fee per gas, what a wallet should have, and what an account may burn in a day. */
  readonly fees: Readonly<Record<"leastTip" | "mostTip" | "maxFee" | "lowWater" | "dailyGas", bigint>>;
}

const ROWS = {
  base: {
    title: "Base",
    chainId: 8453,
    address: "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913",
    tokenName: "USD Coin",
    domain: "0x02fa7265e7c5d81118673727957699e4d68f74cd74b7db77da710fe8a2c7834f",
    blockSeconds: 2,
    confirmations: 12,
    // Nodes usually suggest the least tip. With the most a settlement of 100,000 gas pays 0.000001 ETH for it.
    fees: {
      leastTip: 10n ** 6n,
      mostTip: 10n ** 7n,
      maxFee: 5n * 10n ** 9n,
      lowWater: 10n ** 15n,
      dailyGas: 10n ** 15n,
    },
  },
} as const satisfies Readonly<Record<string, NetworkRow>>;

export type Network = ReturnType<typeof networkNamed>;

/** In version 1 of x402 a network has its `name`, in version 2 its `caip2`. A token's address is kept and compared as its `key`. */
export function networkNamed(name: keyof typeof ROWS) {
  const { address, tokenName, domain, ...row }: NetworkRow = ROWS[name];
  const token = { symbol: "USDC", decimals: 6, address, key: lowerHex(address), name: tokenName, version: "2", domain };
  return { name: name as string, caip2: `eip155:${row.chainId}`, ...row, token } as const;
}
