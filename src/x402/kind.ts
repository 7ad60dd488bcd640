// The one kind of payment that this version takes: USDC on Base, scheme `exact` (EIP-3009). Every constant of the
// chain and of the token stands here.

export const X402_VERSION = 1;
export const SCHEME = "exact";
/** The network's name in version 1 of x402. */
export const NETWORK = "base";
/** The network's name in version 2 of x402 (CAIP-2). */
export const NETWORK_CAIP2 = "eip155:8453";
export const CHAIN_ID = 8453;
export const ASSET = "USDC";
/** Circle's USDC on Base, with the checksum of EIP-55: official clients compare it as text. */
export const TOKEN = "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913";
/** The token's EIP-712 domain, beside chain and address. */
export const TOKEN_NAME = "USD Coin";
export const TOKEN_VERSION = "2";
