// The networks on which payments are made: one row each, with all that differs between networks. The configuration picks the
// one network of a process, and composition passes it to whatever needs it.
import { type Hex, lowerHex } from "./types.ts";

export const X402_VERSION = 1;
export const SCHEME = "exact";

/** An amount of USDC, which has six decimals on every network, as people write it. */
export function usdc(units: bigint): string {
  const digits = units.toString().padStart(7, "0");
  return `${digits.slice(0, -6)}.${digits.slice(-6)}`.replace(/\.?0+$/, "");
}

interface NetworkRow {
  /** The name shown to people. */
  readonly title: string;
  readonly chainId: number;
  /** The token's address with its EIP-55 checksum: official clients compare it as text. */
  readonly address: Hex;
  readonly tokenName: string;
  /** The hash of the token's EIP-712 domain, as its `DOMAIN_SEPARATOR()` gives it. */
  readonly domain: Hex;
  /** The usual time from one block to the next. */
  readonly blockSeconds: number;
  /** The default number of blocks until an inclusion counts as final. */
  readonly confirmations: number;
  /** In wei: the priority fee's bounds, and the defaults for the fee cap per gas, a wallet's low balance and a day's gas. */
  readonly fees: Readonly<Record<"leastTip" | "mostTip" | "maxFee" | "lowWater" | "dailyGas", bigint>>;
}

const NETWORKS = {
  base: {
    title: "Base",
    chainId: 8453,
    address: "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913",
    tokenName: "USD Coin",
    domain: "0x02fa7265e7c5d81118673727957699e4d68f74cd74b7db77da710fe8a2c7834f",
    blockSeconds: 2,
    confirmations: 12,
    // Nodes usually suggest `leastTip`. At `mostTip`, a settlement of 100,000 gas pays a tip of 0.000001 ETH.
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

/** The network of that name in x402 version 1; null when there is none. */
export const findNetwork = (name: string): Network | null =>
  Object.hasOwn(NETWORKS, name) ? networkNamed(name as keyof typeof NETWORKS) : null;

/** x402 version 1 calls a network by `name`, version 2 by `caip2`. A token's address is kept and compared as its `key`. */
export function networkNamed(name: keyof typeof NETWORKS) {
  const { address, tokenName, domain, ...row }: NetworkRow = NETWORKS[name];
  const token = { symbol: "USDC", decimals: 6, address, key: lowerHex(address), name: tokenName, version: "2", domain };
  return { name: name as string, caip2: `eip155:${row.chainId}`, ...row, token } as const;
}
