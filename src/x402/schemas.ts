// The bodies of x402 as schemas for the API document: the challenge, and the messages between gateway and facilitator. They
// document only: codec.ts parses by hand and decides what is accepted.
import { type Static, Type } from "@sinclair/typebox";
import { type Network, SCHEME, X402_VERSION } from "./network.ts";

const amount = (description: string) => Type.String({ pattern: "^[0-9]+$", description });
const address = (description: string) => Type.String({ pattern: "^0x[0-9a-fA-F]{40}$", description });
const version = Type.Literal(X402_VERSION, { description: "The version of x402." });
const scheme = Type.Literal(SCHEME, { description: "The exact amount is paid." });
const ONE = { minItems: 1, maxItems: 1 };
const text = (description: string) => Type.String({ description });
const named = ({ name }: Network) => Type.Literal(name, { description: "The chain." });

const paymentRequirements = (network: Network) =>
  Type.Object(
    {
      scheme,
      network: named(network),
      maxAmountRequired: amount("The price in smallest units, as a decimal string."),
      resource: Type.String({ description: "The URL of the call.", format: "uri" }),
      description: text("What is paid for."),
      mimeType: text("The media type of what is paid for; may be empty."),
      payTo: address("The payee's address."),
      maxTimeoutSeconds: Type.Integer({ minimum: 1, description: "How long the payment must be valid from now on." }),
      asset: address("The address of the token contract."),
      extra: Type.Object(
        { name: text("The token's name."), version: text("The version of the domain.") },
        { description: "The token's EIP-712 domain." },
      ),
    },
    { $id: "PaymentRequirements", description: "What a payment has to satisfy." },
  );
/** An entry of version 1's `accepts`. A missing `description` or `mimeType` makes official clients throw. */
export type WireRequirements = Static<ReturnType<typeof paymentRequirements>>;

export const paymentChallenge = (network: Network) =>
  Type.Object(
    {
      x402Version: version,
      error: text("Why a payment is asked for."),
      accepts: Type.Array(paymentRequirements(network), { ...ONE, description: "The one way to pay." }),
    },
    { $id: "PaymentChallenge" },
  );

const seconds = (description: string) => amount(`${description}, in unix seconds; exclusive.`);

/** The content of `X-PAYMENT`, there in base64. */
const payment = (network: Network) =>
  Type.Object(
    {
      x402Version: version,
      scheme,
      network: named(network),
      payload: Type.Object(
        {
          signature: text("Of the authorization (EIP-712), as 0x and hexadecimal digits."),
          authorization: Type.Object(
            {
              from: address("The payer."),
              to: address("The payee."),
              value: amount("In smallest units."),
              validAfter: seconds("The beginning"),
              validBefore: seconds("The end"),
              nonce: Type.String({ pattern: "^0x[0-9a-fA-F]{64}$", description: "Used once by this payer." }),
            },
            { description: "The arguments of EIP-3009 `transferWithAuthorization`." },
          ),
        },
        { description: "The authorization and its signature." },
      ),
    },
    { $id: "Payment", description: "The content of `X-PAYMENT`." },
  );

export const settleRequest = (network: Network) =>
  Type.Object(
    { x402Version: version, paymentPayload: payment(network), paymentRequirements: paymentRequirements(network) },
    {
      $id: "SettleRequest",
      description: "`description`, `mimeType` and `extra` may be left out, and unknown keys are ignored.",
    },
  );

export const settleResponse = (network: Network) =>
  Type.Object(
    {
      success: Type.Boolean({ description: "Whether the payment has been collected." }),
      errorReason: Type.Optional(text("On a failure: always the same coarse text.")),
      transaction: text(
        'The hash. On a failure "" says that no transaction of this facilitator can collect the payment any more; a hash names one that still may.',
      ),
      network: named(network),
      payer: address("Who signed, in lower case."),
    },
    { $id: "SettleResponse" },
  );

export function supportedKinds(network: Network) {
  const fields = { x402Version: version, scheme, network: named(network), asset: address("The token contract.") };
  const kinds = Type.Array(Type.Object(fields), { ...ONE, description: "The kinds of payment that are settled." });
  return Type.Object({ kinds }, { $id: "SupportedKinds" });
}
