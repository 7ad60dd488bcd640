// Puts Circle's own USDC contract at its Base address on a development chain (anvil with chain ID 8453), so that
// what signs for Base's token signs for this one; and Multicall3 where it stands on Base. They are the published builds,
// not imitations of them: fiat-token.json and multicall3.json say where they are from.
import { encodeFunctionData, type Hex, maxUint256, parseAbi, toHex } from "viem";
import { CHAIN_ID, TOKEN, TOKEN_NAME } from "../../x402/kind.ts";
import { library, token } from "./fiat-token.json" with { type: "json" };
import multicall3 from "./multicall3.json" with { type: "json" };

/** Calls one method of the node, and gives its result or throws its error. */
export type CallNode = (method: string, params: readonly unknown[]) => Promise<unknown>;

/** Holds every role of the token: owner, master minter, minter, pauser, blacklister. An impersonated account: no key of it exists. */
const TOKEN_ADMIN: Hex = "0x000000000000000000000000746f6c6c67617465";

/** The token's `DOMAIN_SEPARATOR()` on Base. Equal here means: same name, version, chain and address. */
const BASE_DOMAIN_SEPARATOR = "0x02fa7265e7c5d81118673727957699e4d68f74cd74b7db77da710fe8a2c7834f";

const ADMIN_WEI = 10n ** 24n;
const ADMIN_GAS = 500_000n;
const ADMIN_MAX_FEE_WEI = 2n * 10n ** 12n;
/** Almost none: nodes recommend tips by those that they have seen, and this one must not change the recommendation. */
const ADMIN_TIP_WEI = 1n;

const ABI = parseAbi([
  "function initialize(string tokenName, string tokenSymbol, string tokenCurrency, uint8 tokenDecimals, address newMasterMinter, address newPauser, address newBlacklister, address newOwner)",
  "function initializeV2(string newName)",
  "function initializeV2_1(address lostAndFound)",
  "function initializeV2_2(address[] accountsToBlacklist, string newSymbol)",
  "function configureMinter(address minter, uint256 minterAllowedAmount) returns (bool)",
  "function mint(address to, uint256 amount) returns (bool)",
  "function DOMAIN_SEPARATOR() view returns (bytes32)",
]);

/**
 * Installs the token on a fresh chain and mines a block. The contract keeps nothing outside its storage, so its code
 * and the calls that a proxy's deployment makes are all there is to it. Once more on the same chain changes nothing.
 * @throws Error when the node runs another chain, or when what stands there is not Base's token.
 */
export async function installToken(request: CallNode): Promise<void> {
  if (Number(await request("eth_chainId", [])) !== CHAIN_ID) {
    throw new Error(`the development chain has not the ID ${CHAIN_ID}`);
  }
  await request("anvil_setCode", [library.address, library.code]);
  await request("anvil_setCode", [TOKEN, token.code]);
  await request("anvil_setCode", [multicall3.address, multicall3.code]);
  await request("anvil_impersonateAccount", [TOKEN_ADMIN]);
  await request("anvil_setBalance", [TOKEN_ADMIN, toHex(ADMIN_WEI)]);
  const roles = [TOKEN_ADMIN, TOKEN_ADMIN, TOKEN_ADMIN, TOKEN_ADMIN] as const;
  const calls = [
    encodeFunctionData({
      abi: ABI,
      functionName: "initialize",
      args: [TOKEN_NAME, "USDC", "USD", 6, ...roles],
    }),
    encodeFunctionData({ abi: ABI, functionName: "initializeV2", args: [TOKEN_NAME] }),
    encodeFunctionData({ abi: ABI, functionName: "initializeV2_1", args: [TOKEN_ADMIN] }),
    encodeFunctionData({ abi: ABI, functionName: "initializeV2_2", args: [[], "USDC"] }),
    encodeFunctionData({ abi: ABI, functionName: "configureMinter", args: [TOKEN_ADMIN, maxUint256] }),
  ];
  for (const data of calls) await callAsAdmin(request, data);
  await request("evm_mine", []);
  const separator = encodeFunctionData({ abi: ABI, functionName: "DOMAIN_SEPARATOR" });
  const found = await request("eth_call", [{ to: TOKEN, data: separator }, "latest"]);
  if (found !== BASE_DOMAIN_SEPARATOR) throw new Error(`the token's domain is not Base's: ${String(found)}`);
}

/** The call by which the admin mints, in smallest units of the token, by the token's own rules. */
export function mintCall(to: Hex, units: bigint): Hex {
  return encodeFunctionData({ abi: ABI, functionName: "mint", args: [to, units] });
}

/**
 * Sends a call of the token by the holder of its roles.
 * @returns the transaction's hash; it is not mined yet
 */
export async function callAsAdmin(request: CallNode, data: Hex, tipWei = ADMIN_TIP_WEI): Promise<Hex> {
  const hash = await request("eth_sendTransaction", [
    {
      from: TOKEN_ADMIN,
      to: TOKEN,
      data,
      // Not estimated: an estimate would run on the state before the calls that still wait.
      gas: toHex(ADMIN_GAS),
      maxPriorityFeePerGas: toHex(tipWei),
      maxFeePerGas: toHex(ADMIN_MAX_FEE_WEI),
    },
  ]);
  if (typeof hash !== "string" || !/^0x[0-9a-f]{64}$/.test(hash)) throw new Error("the node gave no hash");
  return hash as Hex;
}
