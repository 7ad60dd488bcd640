// Bytes as Ethereum writes them: `0x` and hexadecimal digits, of lower case wherever two of them are compared.

export type Hex = `0x${string}`;
