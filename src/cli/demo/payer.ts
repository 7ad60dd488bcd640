// The payer of the demo. Like any client of x402 it has a key of its own and signs what the challenge demands. The
// signature is made by viem and not by the product's own code, which would only agree with itself.
import { bytesToHex, type Hex } from "viem";
import { generatePrivateKey, privateKeyToAccount } from "viem/accounts";
import { systemClock } from "../../core/clock.ts";
import { CHAIN_ID, X402_VERSION } from "../../x402/kind.ts";
import { at, textAt } from "./http.ts";
import { DemoProblem } from "./problem.ts";

/** Official clients do the same, since the clocks of chain and payer differ. */
const BACKDATED_SECONDS = 600;

const TYPES = {
  TransferWithAuthorization: [
    { name: "from", type: "address" },
    { name: "to", type: "address" },
    { name: "value", type: "uint256" },
    { name: "validAfter", type: "uint256" },
    { name: "validBefore", type: "uint256" },
    { name: "nonce", type: "bytes32" },
  ],
} as const;

/** An account of this run. */
export interface DemoAccount {
  readonly key: Hex;
  readonly address: Hex;
}

export function newAccount(): DemoAccount {
  const key = generatePrivateKey();
  return { key, address: privateKeyToAccount(key).address };
}

export type SignedPayment = Awaited<ReturnType<typeof signPayment>>;

/**
 * Signs what the body of a 402 asks for.
 *
 * @throws DemoProblem when it is no challenge
 */
export async function signPayment({ key }: DemoAccount, challenge: unknown) {
  const asked = at(challenge, "accepts", 0);
  const account = privateKeyToAccount(key);
  const now = Math.floor(systemClock.now() / 1000);
  const words = {
    from: account.address,
    to: hexAt(asked, "payTo"),
    value: BigInt(textAt(asked, "maxAmountRequired")),
    validAfter: BigInt(now - BACKDATED_SECONDS),
    validBefore: BigInt(now + Number(at(asked, "maxTimeoutSeconds"))),
    nonce: bytesToHex(crypto.getRandomValues(new Uint8Array(32))),
  };
  const signature = await account.signTypedData({
    domain: {
      name: textAt(asked, "extra", "name"),
      version: textAt(asked, "extra", "version"),
      chainId: CHAIN_ID,
      verifyingContract: hexAt(asked, "asset"),
    },
    types: TYPES,
    primaryType: "TransferWithAuthorization",
    message: words,
  });
  /** In wire format: every number is a decimal string. */
  const authorization = {
    ...words,
    value: `${words.value}`,
    validAfter: `${words.validAfter}`,
    validBefore: `${words.validBefore}`,
  };
  const payload = {
    x402Version: X402_VERSION,
    scheme: textAt(asked, "scheme"),
    network: textAt(asked, "network"),
    payload: { signature, authorization },
  };
  /** The value of X-PAYMENT. */
  const header = Buffer.from(JSON.stringify(payload)).toString("base64");
  return { authorization, signature, header };
}

function hexAt(value: unknown, name: string): Hex {
  const text = textAt(value, name);
  if (/^0x[0-9a-fA-F]{40}$/.test(text)) return `0x${text.slice(2)}`;
  throw new DemoProblem(`the challenge's ${name} is no address`);
}
